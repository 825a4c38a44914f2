"""What all rooms share: settings, requests, attention patterns, layers as data, checks and errors. No jax."""
