"""Traces of engines: compilations and their causes, time by part, and decisions; as a folder and a page."""

from ksana_jax.lab.trace.bundle import TraceBundle, tracing

__all__ = ["tracing", "TraceBundle"]
