"""Requests that arrive over time: generated ones and published traces. Knows no engine; NumPy only, no jax."""
