"""Where keys and values live. Host half (patterns, block_manager) without jax, device half (cache)."""
