"""Decides where every KV block is stored: on the device, on the host or on disk. Part of the host half; no jax."""
