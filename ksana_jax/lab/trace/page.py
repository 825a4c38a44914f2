"""The page of a trace: summary tables in one HTML file without scripts that loads nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2

from ksana_jax.core.units import byte_size


def render(content: Mapping[str, Any]) -> str:
    """Returns the page of a trace, or of an ahead-of-time trace; content: of trace.json."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"fmt": lambda value, spec: "-" if value is None else format(value, spec), "size": byte_size}
    template = environment.from_string(resources.files("ksana_jax").joinpath("assets/trace.html").read_text("utf-8"))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(content["time"]))
    return template.render({"target": None, **content, "when": when})
