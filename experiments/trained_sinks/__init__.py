"""Models that differ only in a head's sink: how to train them, and how their sinks emerge."""
