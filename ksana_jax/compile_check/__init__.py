"""Compiles kernels and steps for hardware that is not there."""
