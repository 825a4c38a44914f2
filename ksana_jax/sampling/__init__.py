"""Samples tokens from scores and computes log-probabilities, in compiled functions with per-row settings."""
