"""Messages between processes: plain values and arrays, in a form that can hold nothing else. No pickle, no jax.

A message is a length, a line of JSON, and the bytes of its arrays one after the other. JSON has the structure: numbers,
texts, lists, {"array": index}, and {"kind": name, "of": [...]} for a few types that both sides know.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

_LENGTHS = struct.Struct(">Q")
MAX_HEADER = 2**26
MAX_ARRAYS_BYTES = 2**34
MAX_DEPTH, MAX_DIMENSIONS = 32, 32
_DTYPES = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")


class Closed(ConnectionError):
    """The peer or the network has closed the connection."""


def encoded(message: Any, kinds: Iterable[type] = ()) -> list[bytes | memoryview]:
    """Returns a message as pieces to send one after the other.

    Args:
      message: None, numbers, texts, lists, tuples, dicts, NumPy arrays, and NamedTuples and dataclasses of `kinds`.

    Raises:
      TypeError: it has anything else.
    """
    arrays: list[np.ndarray] = []
    body = _plain(message, arrays, frozenset(kinds))
    header = json.dumps([body, [[x.dtype.name, x.shape] for x in arrays]]).encode()
    return [_LENGTHS.pack(len(header)), header, *(x.data.cast("B") for x in arrays if x.size)]


def _plain(x: Any, arrays: list[np.ndarray], kinds: frozenset[type]) -> Any:
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray):
        if x.dtype.name not in _DTYPES:
            raise TypeError(f"arrays of {x.dtype} are not sent")
        arrays.append(x if x.flags.c_contiguous else x.copy())
        return {"array": len(arrays) - 1}
    if type(x) in kinds:
        fields = x if isinstance(x, tuple) else [getattr(x, field.name) for field in dataclasses.fields(x)]
        return {"kind": type(x).__name__, "of": [_plain(part, arrays, kinds) for part in fields]}
    if type(x) is list:
        return [_plain(part, arrays, kinds) for part in x]
    if type(x) is tuple:
        return {"tuple": [_plain(part, arrays, kinds) for part in x]}
    if isinstance(x, dict):
        return {"dict": [[_plain(key, arrays, kinds), _plain(value, arrays, kinds)] for key, value in x.items()]}
    raise TypeError(f"a message cannot have a {type(x).__name__}")


def _restored(x: Any, arrays: list[np.ndarray], kinds: dict[str, type], depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")

    def part(inner: Any) -> Any:
        return _restored(inner, arrays, kinds, depth + 1)

    if isinstance(x, list):
        return [part(inner) for inner in x]
    if not isinstance(x, dict):
        return x
    if "array" in x:
        return arrays[x["array"]]
    if "tuple" in x:
        return tuple(part(inner) for inner in x["tuple"])
    if "dict" in x:
        return {part(key): part(value) for key, value in x["dict"]}
    return kinds[x["kind"]](*[part(inner) for inner in x["of"]])


class Channel:
    """One end of a connection. Several threads may send; one receives.

    Args:
      kinds: types that messages may have, the same on both sides.

    Attributes:
      deadline: `time.monotonic()` at which receiving ends, however the bytes arrive; None waits for ever.
    """

    def __init__(self, connection: socket.socket, kinds: Iterable[type] = ()):
        self.socket, self.kinds = connection, tuple(kinds)
        self.deadline: float | None = None
        self._sending = threading.Lock()
        watch(connection)

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
          Closed: the connection is broken.
        """
        self.send_pieces(encoded(message, self.kinds))

    def send_pieces(self, pieces: list[bytes | memoryview]) -> None:
        """Sends a message that is `encoded`, perhaps for several channels."""
        try:
            with self._sending:
                self.socket.sendall(b"".join(pieces))
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, max_header: int = MAX_HEADER, max_arrays_bytes: int = MAX_ARRAYS_BYTES) -> Any:
        """Waits for a message and returns it.

        Args:
          max_header, max_arrays_bytes: maximum bytes of its JSON, and of its arrays.

        Raises:
          Closed: the connection is broken, or received an invalid message.
        """
        try:
            [length] = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
            if length > max_header:
                raise Closed("what arrived is no message")
            body, shapes = json.loads(self._exactly(length))
            arrays = self._arrays(shapes, max_arrays_bytes)
            return _restored(body, arrays, {kind.__name__: kind for kind in self.kinds})
        except Closed:
            raise
        except OSError as error:
            raise Closed(str(error)) from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Closed(f"what arrived is no message ({type(error).__name__})") from error

    def _arrays(self, shapes: list[Any], room: int) -> list[np.ndarray]:
        found = []
        for dtype, shape in shapes:
            if (
                dtype not in _DTYPES
                or len(shape) > MAX_DIMENSIONS
                or any(type(size) is not int or size < 0 for size in shape)
            ):
                raise Closed("what arrived is no message")
            room -= math.prod(shape) * np.dtype(dtype).itemsize
            if room < 0:
                raise Closed("what arrived is no message")
            array = np.empty(shape, dtype)
            if array.size:
                self._fill(array.data.cast("B"))
            found.append(array)
        return found

    def _exactly(self, count: int) -> bytes:
        piece = bytearray(count)
        self._fill(memoryview(piece))
        return bytes(piece)

    def _fill(self, room: memoryview) -> None:
        while len(room):
            if self.deadline is not None:
                if (left := self.deadline - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                self.socket.settimeout(left)
            count = self.socket.recv_into(room)
            if not count:
                raise Closed("the connection was closed")
            room = room[count:]

    def close(self) -> None:
        """Closes the connection; a thread that receives from it wakes up."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()


# TCP keepalive: idle seconds before the first probe, seconds between probes, and their number.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def watch(connection: socket.socket) -> None:
    """Has the kernel end a connection within some 8 s after the other host is lost, whatever both processes do.

    A process that ends closes its connections at once; only a host or a network that fails is silent.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 8000)
