"""Traces of engines: what was compiled and why, where time went, which decisions were taken; as a folder and a page."""

from ksana_jax.lab.trace.bundle import Trace, tracing

__all__ = ["tracing", "Trace"]
