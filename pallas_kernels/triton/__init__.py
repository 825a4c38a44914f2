"""Kernels for Ampere and later on Pallas' Triton back end. jax has deprecated it: this folder goes with it."""
