"""Kernels for Hopper in Mosaic GPU. `decode`, `prefill`, `mass`, `kv_write` and `product` are to be called; the rest
is theirs."""
