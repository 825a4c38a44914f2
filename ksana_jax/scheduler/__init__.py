"""What runs in a step. No jax: a scheduling test takes milliseconds, and a simulator is this with another executor."""
