"""A PJRT plugin without hardware that simulates a limited device: OpenXLA's CPU plugin behind a thin wrapper.

The wrapper (loopback.cc) passes each call of the C API on to the plugin. On the way it renames the platform, withholds
functions, refuses programs with some operations, counts the device's memory and has jax copy arrays between it and the
host. It says nothing about any vendor's compiler, numbers or speed, and its devices have "loopback" in their kind.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.units import GIB
from ksana_jax.native.compiler import CannotBuild, compiler_command
from tests.loopback import openxla

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("loopback.cc", "functions.inc"))
# Functions of the PJRT C API, in the order of its table.
FUNCTIONS = re.findall(r"F\((\w+)\)", _SOURCES[1].read_text())
_REFUSES = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclasses.dataclass(frozen=True)
class LoopbackOptions:
    """Configures the loopback's missing features.

    Args:
      memory_bytes: memory of each device. Arrays and programs beyond it are refused with RESOURCE_EXHAUSTED.
      pinned_host: whether devices also have the plugin's memories on the host, "pinned_host" among them.
      lacks: names of functions of the PJRT C API that answer UNIMPLEMENTED, such as "Executable_GetCostAnalysis";
        "donation" ignores that arguments are donated.
      lacks_operations: operations that no program may have: "scatter" or "stablehlo.scatter", and "dynamic while" for
        loops whose number of turns is not a constant of the program.
    """

    memory_bytes: int = 16 * GIB
    pinned_host: bool = False
    lacks: Sequence[str] = ()
    lacks_operations: Sequence[str] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> LoopbackOptions:
        """Reads options as they are written in YAML.

        Raises:
          ConfigError: an option is unknown, or its value is invalid.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"the loopback plugin has no option {unknown[0]!r}; it has {', '.join(known)}")
        return cls(**given)

    def __post_init__(self):
        checks.require(
            checks.integer("memory_bytes", self.memory_bytes, 1, 2**62),
            checks.boolean("pinned_host", self.pinned_host),
            error=ConfigError,
        )
        for names in (self.lacks, self.lacks_operations):
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"{names!r:.80} is not a list of names")
        if unknown := [name for name in self.lacks if name not in (*FUNCTIONS, "donation")]:
            raise ConfigError(f"lacks has {unknown[0]!r}, which is no function of the PJRT C API")


@functools.cache
def why_missing() -> str | None:
    """Returns why there is no loopback here, or None."""
    if reason := openxla.why_missing():
        return f"the loopback wraps OpenXLA's CPU plugin: {reason}"
    try:
        library()
    except (CannotBuild, OSError) as error:
        return f"the loopback is written in C++: {error}"
    return None


@functools.cache
def library() -> Path:
    """Returns the compiled wrapper, from the user's cache folder if it is cached.

    Raises:
      CannotBuild: there is no compiler, or it fails. OSError: the folder cannot be written.
    """
    command = [*compiler_command(), "-std=c++17", "-O1", "-fPIC", "-shared", str(_SOURCES[0]), "-ldl", "-o"]
    key = hashlib.sha256(b"\0".join([" ".join(command).encode(), *(path.read_bytes() for path in _SOURCES)]))
    path = cache_folder("native") / f"loopback-{key.hexdigest()[:24]}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")  # several processes may compile it at once
        done = subprocess.run([*command, str(made)], capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
        made.replace(path)
    return path


# This process's; the last one counts. Never freed, because jaxlib calls them.
opened: list[Loopback] = []


class Loopback:
    """The wrapper, opened on the plugin; a process has one.

    Args:
      platform: the client's own name.

    Attributes:
      operations: {StableHLO operation: element types} of all programs so far, if `records` is set.

    Raises:
      ConfigError: there is none here.
    """

    def __init__(self, platform: str, options: LoopbackOptions | None = None):
        if reason := why_missing():
            raise ConfigError(reason)
        self.options, self.records = options or LoopbackOptions(), False
        self.operations: dict[str, set[str]] = {}
        self._messages: dict[str, Any] = {}
        self._refuses = _REFUSES(self._why_refused)
        self._library = ctypes.CDLL(str(library()))
        self._library.loopback_open.restype = ctypes.c_char_p
        self._library.loopback_calls.restype = ctypes.c_int64
        if error := self._library.loopback_open(str(openxla.PATH).encode(), platform.encode(), self._refuses):
            raise ConfigError(f"{openxla.PATH}: {error.decode()}")
        for index, name in enumerate(FUNCTIONS):
            self._library.loopback_withhold(index, name in self.options.lacks)
        opened.append(self)

    def calls(self, function: str) -> int:
        """Returns how often a function of the PJRT C API was called so far."""
        return self._library.loopback_calls(FUNCTIONS.index(function))

    def _why_refused(self, code: int, size: int) -> int | None:
        """Returns the address of the reason why a program is refused, or None. Runs on threads of jaxlib."""
        lacks = self.options.lacks_operations
        if not lacks and not self.records:
            return None
        from tests.loopback.operations import operations_of

        try:
            found = operations_of(ctypes.string_at(code, size))
        except Exception as error:  # it would be lost in a callback, and the program pass
            return self._address(f"the loopback cannot read a program: {error}")
        for name, types in found.items():
            if name in lacks or name.partition(".")[2] in lacks:
                return self._address(f"failed to legalize operation '{name}'")
            if self.records:
                self.operations.setdefault(name, set()).update(types)
        return None

    def _address(self, message: str) -> int:
        return ctypes.addressof(self._messages.setdefault(message, ctypes.create_string_buffer(message.encode())))


def register(platform: str, options: Mapping[str, Any]) -> None:
    """Registers the loopback as a platform of jax, which must not have started its backends.

    Args:
      options: fields of `LoopbackOptions`.

    Raises:
      ConfigError: options are wrong, or there is no loopback here.
    """
    read = Loopback(platform, LoopbackOptions.read(options)).options
    from jax._src import xla_bridge

    given = {"memory_bytes": read.memory_bytes, "pinned_host": int(read.pinned_host)}
    given["donation"] = int("donation" not in read.lacks)
    xla_bridge.register_plugin(platform, priority=500, library_path=str(library()), options=given)
