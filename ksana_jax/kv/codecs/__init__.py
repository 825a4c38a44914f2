"""Codecs: how keys and values are stored in the blocks of a pool."""
