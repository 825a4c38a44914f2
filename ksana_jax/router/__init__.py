"""Chooses the server of a request: policies, what each server caches, work under way. No HTTP, no jax.

The proxy and the simulator share it.
"""
