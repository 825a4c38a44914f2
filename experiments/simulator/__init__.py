"""How well simulations predict a real engine, and an engine whose device only waits."""
