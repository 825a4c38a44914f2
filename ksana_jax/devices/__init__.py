"""Devices that an engine runs on: how one is chosen, what it can do, and a plugin that plays one.

Reading order: `target` (the setting `device`), `starting` (registers its plugin and starts jax), `capabilities`
(what the engine asks of a device), `loopback` (a PJRT plugin without hardware).
"""
