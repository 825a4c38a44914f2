"""Models that differ only in what a head can rest its attention on: how to train them, and how their sinks emerge."""
