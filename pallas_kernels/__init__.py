"""Pallas kernels: a small independent library. Plain arrays in, plain arrays out; imports only jax.

Nothing here knows requests, owners of blocks or models, so a kernel can be extracted, tested and timed alone. The
engine reaches kernels only through `ksana_jax.ops`, where each is tested against a reference.

`contract` has the types of calls and their results; `reference`, `kv_write_reference` and `product_reference` define
their meaning; `registry` has the kernels by name.
README.md lists the kernels and their figures.
"""
