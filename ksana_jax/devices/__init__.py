"""Devices that an engine runs on: how one is chosen, and what it can do.

Reading order: `target` (the setting `device`), `starting` (registers its plugin and starts jax), `capabilities`
(what the engine asks of a device).
"""
