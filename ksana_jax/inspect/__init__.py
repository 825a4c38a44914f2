"""Observers of an engine: which block is stored where, who owns it, and how that changes from step to step."""
