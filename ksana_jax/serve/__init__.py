"""Serving over HTTP: the server, the gateway in front of several, routing, and workloads."""
