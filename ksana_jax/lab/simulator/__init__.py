"""The real engine, scheduler and KV memory under a virtual clock, with a model of the time that steps take. No jax."""
