"""Machines of a Ray cluster: a connection, and places for processes on its nodes. Knows no trials and no engines."""
