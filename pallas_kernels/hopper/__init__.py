"""Kernels for Hopper in Mosaic GPU. `decode`, `prefill`, `mass`, `kv_write` and `product` are public; the rest
is internal."""
