"""Shared by all packages: settings, requests, attention patterns, layers as data, checks and errors. No jax."""
