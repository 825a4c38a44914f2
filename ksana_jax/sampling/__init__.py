"""From scores to tokens and log-probabilities, in compiled functions with per-row settings."""
