"""The state that all functions of the loopback plugin share."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.loopback_options import LoopbackOptions
from ksana_jax.devices.loopback.hardware import Device, Topology
from ksana_jax.devices.loopback.marshal import Handles, Kept


class State(Kept):
    """Base of the classes whose methods are functions of the C API, with the same names.

    Functions that destroy something use nothing but `self`: they are also called in the interpreter's last collection,
    when the names of modules are gone.

    Attributes:
      cpu: jaxlib's CPU client, which does the work; None before the client is created.
      operations: {StableHLO operation: element types} of all programs so far, if `records` is set.
      programs: {code and options: program}; None compiles a program again each time.
    """

    def __init__(self, platform: str, options: LoopbackOptions):
        super().__init__()
        self.platform, self.options = platform, options
        self.handles = Handles()
        self.cpu: Any = None
        self.devices: list[Device] = []
        self.topology: Topology | None = None
        self.records = False
        self.operations: dict[str, set[str]] = {}
        self.programs: dict[tuple[bytes, bytes], Any] | None = None

    @property
    def version(self) -> str:
        """The platform's version."""
        return "loopback 1 (jaxlib's CPU client)"

    def event(self) -> int:
        """Returns the handle of an event that has happened."""
        return self.keep("event", lambda: self.handles.add(Kept()))
