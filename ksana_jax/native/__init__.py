"""Attention, products with weights, norms and layers for CPUs in C++, compiled when they are first needed.

`kernel`, `operators` and `grouped` have the functions; the rest is internal.
"""
