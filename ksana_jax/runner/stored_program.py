"""Compiled programs as bytes, and as functions that are loaded when they are called. Knows no folders."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import compilation_cache as jax_cache
from jax._src.lib import _jax, xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable

from ksana_jax.core.compilation_cache import UNREAD, last_read
from ksana_jax.native.compiler import CannotBuild
from ksana_jax.native.target import register_targets
from ksana_jax.runner.value_digest import NotStored
from ksana_jax.scheduler.step.types import StepArrays

# Trees that programs return, besides those of their arguments: each made of its parts and, of a dict, its keys.
_KINDS: dict[type, Callable[[list[Any], Any], Any]] = {
    tuple: lambda parts, keys: tuple(parts),
    dict: lambda parts, keys: dict(zip(keys, parts, strict=True)),
    type(None): lambda parts, keys: None,
    StepArrays: lambda parts, keys: StepArrays(*parts),
}
_NAMES = {kind.__name__: made for kind, made in _KINDS.items()}


class Pickler(serialize_executable._JaxPjrtPickler):
    """jax's pickler of executables; one that jax has read from its cache keeps the bytes that it had there.

    XLA cannot serialise what it has deserialised: the result loads, and then lacks functions.
    """

    cached: bytes | None = None

    def persistent_id(self, obj: Any) -> Any:
        if self.cached is not None and isinstance(obj, xla_client.LoadedExecutable | _jax.Executable):
            return "exec", self.cached
        return super().persistent_id(obj)


def compile_to_keep(lowered: Any) -> tuple[Any, Any]:
    """Compiles a program; returns it, and what `serialised` needs to know of jax's cache."""
    last_read()
    return lowered.compile(), last_read()


def serialised(compiled: Any, read: Any) -> bytes:
    """Serialises a program of `compile_to_keep`.

    Raises:
      NotStored: it cannot be serialised.
    """
    if read is UNREAD and jax.config.values["jax_compilation_cache_dir"]:
        raise NotStored("jax has compiled one before, and may have read it from its cache")
    executable = getattr(compiled._executable, "_unloaded_executable", None)
    if executable is None or compiled._params.const_args or executable.host_callbacks:
        raise NotStored("one calls Python, or has constants on the device")
    with io.BytesIO() as file:
        pickler = Pickler(file)
        if isinstance(read, bytes):
            pickler.cached, _ = jax_cache.extract_executable_and_time(jax_cache.decompress_executable(read))
        try:
            pickler.dump((executable, jax.tree.leaves(compiled.args_info), compiled._no_kwargs))
        except Exception as error:  # any of XLA's or of pickle's
            raise NotStored(f"one cannot be serialised: {error}") from error
        return file.getvalue()


def described(compiled: Any) -> dict[str, Any]:
    """Returns what `Program` needs besides the bytes, for JSON.

    Raises:
      NotStored: a result is a tree of a type that no argument has.
    """
    arguments, _ = compiled.in_tree.children()
    devices = [device.id for device in compiled._executable._unloaded_executable.device_list]
    return {"devices": devices, "results": _folded(compiled.out_tree, arguments.children())}


def _folded(tree: Any, arguments: Sequence[Any]) -> Any:
    if tree in arguments:
        return arguments.index(tree)
    if (node := tree.node_data()) is None:
        return "leaf"
    if node[0] not in _KINDS:
        raise NotStored(f"one returns a {node[0].__qualname__}")
    keys = node[1] if node[0] is dict else None
    return [node[0].__name__, [_folded(part, arguments) for part in tree.children()], keys]


def _unfolded(tree: Any, arguments: Sequence[Any]) -> Any:
    """Returns a tree of results with any leaves."""
    if isinstance(tree, int):
        return arguments[tree]
    return 0 if tree == "leaf" else _NAMES[tree[0]]([_unfolded(part, arguments) for part in tree[1]], tree[2])


class Program:
    """A loaded program, whose arguments' and results' trees are known when it is first called.

    Args:
      content: from `serialised`. devices, results: from `described`.
    """

    def __init__(self, content: bytes, devices: Sequence[int], results: Any):
        with contextlib.suppress(CannotBuild):
            register_targets()
        client = jax.local_devices()[0].client
        by_number = {device.id: device for device in client.devices()}
        unpickler = serialize_executable._JaxPjrtUnpickler(io.BytesIO(content), client, [by_number[n] for n in devices])
        executable, self._arguments, self._no_kwargs = unpickler.load()
        self._executable, self._results = executable.load(), results

    def of(self, *arguments: Any) -> jax.stages.Compiled:
        """Returns the program for arguments of some trees."""
        return self._compiled(arguments, _unfolded(self._results, arguments))

    def of_leaves(self) -> jax.stages.Compiled:
        """Returns the program of the leaves of its arguments, which returns those of its results."""
        return self._compiled(tuple(self._arguments), [0] * len(self._executable.out_avals))

    def _compiled(self, arguments: tuple[Any, ...], results: Any) -> jax.stages.Compiled:
        described, results = jax.tree.structure((arguments, {})).unflatten(self._arguments), jax.tree.structure(results)
        return jax.stages.Compiled(self._executable, [], described, results, no_kwargs=self._no_kwargs)


class StoredProgram:
    """A program that is loaded when it is needed, with the methods of `jax.stages.Compiled`.

    Args:
      load: returns a `Program`, or a `jax.stages.Compiled`. program_bytes: see `program_memory.bytes_of`.
    """

    def __init__(self, load: Callable[[], Any], program_bytes: int | None):
        self.load, self.program_bytes, self._run = load, program_bytes, None

    def __call__(self, *arguments: Any) -> Any:
        if self._run is None:
            found = self.load()
            self._run = found.of(*arguments) if isinstance(found, Program) else found
        return self._run(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._run or self.load()
        return getattr(found.of_leaves() if isinstance(found, Program) else found, name)
