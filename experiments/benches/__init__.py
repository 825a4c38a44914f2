"""Benchmarks that only studies and developers run: `ksana bench experiments.benches.host:Host`, from a checkout."""
