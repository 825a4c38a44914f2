"""Native doors to Python callbacks, for callers that have a Python exception pending.

When a call fails, its temporaries are destroyed while its exception is pending; a jax array among them destroys its
buffer, which calls the plugin. ctypes enters Python as if nothing were pending, and the exception is lost or taken for
the callback's own. A door puts it away meanwhile:

    state = PyGILState_Ensure(); PyErr_Fetch(&type, &value, &trace)
    error = callback(arguments)
    PyErr_Restore(type, value, trace); PyGILState_Release(state); return error

There are doors for Linux on x86-64. Elsewhere callbacks are called directly: an error inside a jitted call can then
end the process.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Sequence

_API = ctypes.pythonapi
_SIZE = 128


def exist() -> bool:
    """Whether there are doors for this machine."""
    return platform.machine() == "x86_64" and platform.system() == "Linux"


def doors(callbacks: Sequence[int]) -> tuple[list[int], object]:
    """Returns addresses to call in place of callbacks, and what must be kept as long as they are called.

    Without doors for this machine, or where it refuses to execute new code, those are the callbacks' own.
    """
    if not exist():
        return list(callbacks), None
    memory = mmap.mmap(-1, _SIZE * len(callbacks), prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(view)
    for index, callback in enumerate(callbacks):
        memory[index * _SIZE : (index + 1) * _SIZE] = _x86_64(callback).ljust(_SIZE, b"\xcc")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(start, len(memory), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        return list(callbacks), None
    return [start + index * _SIZE for index in range(len(callbacks))], (memory, view)


def _x86_64(callback: int) -> bytes:
    def call(target: int) -> bytes:
        return b"\x48\xb8" + struct.pack("<Q", target) + b"\xff\xd0"  # mov rax, target; call rax

    def python(name: str) -> bytes:
        address = ctypes.cast(getattr(_API, name), ctypes.c_void_p).value
        assert address is not None
        return call(address)

    return b"".join(
        (
            b"\x53\x48\x83\xec\x30",  # push rbx; sub rsp, 48: the stack stays aligned to 16
            b"\x48\x89\xfb",  # mov rbx, rdi: the arguments
            python("PyGILState_Ensure"),
            b"\x89\x04\x24",  # mov [rsp], eax: state
            b"\x48\x8d\x7c\x24\x08\x48\x8d\x74\x24\x10\x48\x8d\x54\x24\x18",  # lea rdi, rsi, rdx, [rsp + 8, 16, 24]
            python("PyErr_Fetch"),
            b"\x48\x89\xdf",  # mov rdi, rbx
            call(callback),
            b"\x48\x89\xc3",  # mov rbx, rax: the error
            b"\x48\x8b\x7c\x24\x08\x48\x8b\x74\x24\x10\x48\x8b\x54\x24\x18",  # mov rdi, rsi, rdx, [rsp + 8, 16, 24]
            python("PyErr_Restore"),
            b"\x8b\x3c\x24",  # mov edi, [rsp]
            python("PyGILState_Release"),
            b"\x48\x89\xd8\x48\x83\xc4\x30\x5b\xc3",  # mov rax, rbx; add rsp, 48; pop rbx; ret
        )
    )
