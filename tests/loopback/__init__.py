"""A PJRT plugin that simulates a limited device.

`openxla` fetches a prebuilt plugin; `wrapper` wraps it; `operations` lists the StableHLO operations of a
program. `withheld` runs engines without one function or operation at a time, and `page` prints the outcomes.
"""

from typing import Any

from tests.loopback.wrapper import register

__all__ = ["register", "setting"]


def setting(**options: Any) -> dict[str, Any]:
    """Returns the setting `device` of a loopback. options: fields of `LoopbackOptions`."""
    return {"platform": "npu", "plugin": "tests.loopback:register", "options": options, "donation": True}
