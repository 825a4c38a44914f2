"""Pallas kernels: a small library of its own. Plain arrays in, plain arrays out; imports only jax.

Nothing here knows requests, blocks' owners or models, so that a kernel can be taken out, tested and timed alone. The
engine reaches kernels through `ksana_jax.ops` only, where each stands beside a reference that it must equal.

`contract` has the types of calls and their results, `reference` and `kv_write_reference` what they mean, `registry` the
kernels by name.
README.md has the list of kernels and their figures.
"""
