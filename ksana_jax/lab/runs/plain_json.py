"""Valid JSON of values whose numbers may be infinite or NaN. JSON lacks these: {"not_finite": "inf"} stands for one."""

from __future__ import annotations

import json
import math
from typing import Any

_KEY = "not_finite"
_TEXTS = ("inf", "-inf", "nan")


def dumps(value: Any) -> str:
    """Returns a value as one line of JSON."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # it has a number that is not finite, which is rare
        return json.dumps(_encoded(value), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Returns the value of `dumps`; also reads the Infinity and NaN that Python's own json writes."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_KEY: repr(float(value))}
    return value


def _decoded(found: dict[str, Any]) -> Any:
    return float(found[_KEY]) if len(found) == 1 and found.get(_KEY) in _TEXTS else found
