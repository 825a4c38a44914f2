"""Attention for CPUs in C++, compiled when it is first needed. `kernel` is to be called; the rest is its own."""
