"""Quantised safetensors: which tensors stand for a matrix in a format, and the numbers that they give.

`scheme`, `find` and `tensor` are public; the rest is internal.
"""
