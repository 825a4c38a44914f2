"""Decides what runs in a step. No jax: a scheduling test takes milliseconds, and a simulator needs only an executor."""
