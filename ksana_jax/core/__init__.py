"""Shared by all rooms: settings, requests, attention patterns, layers as data, checks and errors. No jax."""
