"""Cached blocks in files: their format, their index, and the tier they make."""
