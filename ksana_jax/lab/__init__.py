"""Measuring and studying: experiments, benchmarks, traces, training, the simulator."""
