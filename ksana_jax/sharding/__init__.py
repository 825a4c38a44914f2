"""Tensor parallelism: one model on several devices of a host, each with a part of all matrices and of the KV heads.

Each step is one program for all devices; each array in it is one device's part (`jax.shard_map`): heads, hidden
units of MLPs and vocabulary are divided, hidden states are whole on every device. Operators and kernels therefore see a
smaller model, `shares.local_model`, and nothing else. Devices add up their results after attention and after the MLP,
two reductions in each layer (Megatron-LM, arXiv:1909.08053, section 3), and once for the embedding; of the scores they
exchange candidates only. Blocks of the KV pool keep their numbers on all devices, so that the host sees one pool.
"""
