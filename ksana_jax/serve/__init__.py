"""Serving over HTTP: the server, the router in front of several, and workloads."""
