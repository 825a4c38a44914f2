"""Measures speed and memory on this machine: `ksana bench host`, `ksana bench throughput`, `bench.peak_memory`."""
