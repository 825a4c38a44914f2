"""The field `response_format` as `StructuredOutputsParams`. Knows no requests."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.structured_outputs import StructuredOutputsParams

_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def structured(given: dict[str, Any]) -> StructuredOutputsParams | None:
    """Returns what a text must follow; None for anything.

    Args:
      given: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": ..., "schema":
        ...}}, or {"type": "structural_tag", "structures": [...], "triggers": [...]}.

    Raises:
      ValueError: it is none of these.
    """
    kind, rest = given.get("type"), {key: value for key, value in given.items() if key != "type" and value is not None}
    if kind not in _TYPES:
        raise ValueError(f"response_format.type is {kind!r:.60}, must be one of {', '.join(_TYPES)}")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=rest)
    if unknown := sorted(rest.keys() - ({"json_schema"} if kind == "json_schema" else set())):
        raise ValueError(f"response_format.{unknown[0]:.60} does not go with type {kind}")
    if kind == "json_schema":
        about = rest.get("json_schema")
        if not isinstance(about, dict) or not isinstance(about.get("schema", {}), dict):
            raise ValueError(f"response_format.json_schema is {about!r:.60}, must be an object with a schema")
        # A model without a schema is asked for any object, strict or not.
        return StructuredOutputsParams(json=about.get("schema") or {"type": "object"})
    return StructuredOutputsParams(json_object=True) if kind == "json_object" else None
