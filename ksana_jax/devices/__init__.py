"""Devices that an engine runs on: their choice and capabilities.

Reading order: `target` (the setting `device`), `starting` (registers its plugin and starts jax), `capabilities`
(the engine's requirements of a device).
"""
