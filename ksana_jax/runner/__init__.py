"""Runs the model on a device: compiled steps, the KV pool and its moves."""
