"""Kernels for Hopper in Mosaic GPU. `decode`, `prefill`, `mass` and `kv_write` are to be called; the rest is theirs."""
