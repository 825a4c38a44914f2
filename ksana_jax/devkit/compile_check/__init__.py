"""Compiles kernels and steps for absent hardware."""
