"""Makes a table of the PJRT C API of the loopback plugin, and registers it with jax."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ksana_jax.core.forks import outlives_python
from ksana_jax.core.loopback_options import LoopbackOptions
from ksana_jax.devices.loopback import abi
from ksana_jax.devices.loopback.doors import doors
from ksana_jax.devices.loopback.marshal import Refused
from ksana_jax.devices.loopback.running import RunningFunctions

# These return nothing.
_VOID = ("Error_Destroy", "Error_Message")


class LoopbackPlugin(RunningFunctions):
    """A plugin whose devices are jaxlib's CPU client behind the PJRT C API.

    Its table is never freed: buffers are destroyed in the interpreter's last collection.

    Attributes:
      calls: {function: number of calls} so far.
    """

    def __init__(self, platform: str, options: LoopbackOptions | None = None):
        super().__init__(platform, options or LoopbackOptions())
        self.calls: dict[str, int] = {}
        self._callbacks = [abi.FUNCTION(self._entry(name)) for name in abi.ARGUMENTS]
        addresses = [ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks]
        called, self._doors = doors(addresses)
        self.api = abi.Api(version_size=24, major=abi.MAJOR, minor=abi.MINOR)
        self.api.struct_size = ctypes.sizeof(self.api)
        self.api.functions[:] = called
        outlives_python(self)

    def capsule(self) -> Any:
        """Returns the table as a capsule, which jax registers."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        name = self.keep("capsule name", lambda: ctypes.c_char_p(b"pjrt_c_api"))
        return new(ctypes.addressof(self.api), name, None)

    def _entry(self, name: str) -> Callable[[int], int | None]:
        absent = _absent(name)
        method = getattr(self, name, absent)
        arguments, calls, fail = abi.ARGUMENTS[name].from_address, self.calls, self.fail
        void = name in _VOID

        # Names of modules and builtins may be gone when the last buffers are destroyed: all that is used is bound here.
        def call(pointer: int, errors: type[Exception] = Exception) -> int | None:
            calls[name] = calls.get(name, 0) + 1
            try:
                (absent if name in self.options.lacks else method)(arguments(pointer))
            except errors as error:
                return None if void else fail(error)
            return None

        return call


def _absent(name: str) -> Callable[[Any], None]:
    def refuse(args: Any) -> None:
        raise Refused("UNIMPLEMENTED", f"PJRT_{name} is not implemented by the loopback plugin")

    return refuse


# {platform: plugin} of this process.
registered: dict[str, LoopbackPlugin] = {}


def register(platform: str, options: LoopbackOptions) -> LoopbackPlugin:
    """Registers a new loopback plugin as a platform of jax, which must not have started its backends."""
    from jax._src import xla_bridge

    plugin = registered[platform] = LoopbackPlugin(platform, options)

    def client() -> Any:
        return outlives_python(xla_bridge.make_pjrt_c_api_client(platform))

    xla_bridge.register_plugin(platform, priority=500, c_api=plugin.capsule(), factory=client)
    return plugin
