"""Functional decoder-only transformers. Parameters are pytrees; nothing here knows blocks, scheduling or files."""
