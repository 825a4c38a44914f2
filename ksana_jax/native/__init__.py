"""Attention, products with weights, norms and layers for CPUs in C++, compiled when they are first needed.

`kernel`, `linear`, `norm` and `layer` are public; the rest is internal.
"""
