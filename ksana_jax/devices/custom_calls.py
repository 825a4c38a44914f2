"""Custom calls of programs on a plugin: C functions that are registered through the FFI extension of its PJRT C API.

jaxlib registers custom calls with its own CPU client; for any other platform, it asks a handler, which plugins of GPUs
bring. This one is for all plugins with the extension: then `jax.ffi.register_ffi_target(..., platform="npu")` works.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

# PJRT_Extension_Type_FFI of pjrt_c_api.h.
FFI = 5


class _Extension(ctypes.Structure):
    """PJRT_Extension_Base."""


_Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(_Extension)),
]


class _FfiExtension(ctypes.Structure):
    """PJRT_FFI_Extension of pjrt_c_api_ffi_extension.h."""

    _fields_ = [
        ("base", _Extension),
        ("type_register", ctypes.c_void_p),
        ("user_data_add", ctypes.c_void_p),
        ("register_handler", ctypes.c_void_p),
    ]


class _Api(ctypes.Structure):
    """The start of PJRT_Api; all versions have it."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("version", ctypes.c_size_t * 3),
        ("error_destroy", ctypes.c_void_p),
        ("error_message", ctypes.c_void_p),
    ]


class _Error(ctypes.Structure):
    """Arguments of PJRT_Error_Destroy, and with the text of PJRT_Error_Message."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("text", ctypes.c_void_p),
        ("text_size", ctypes.c_size_t),
    ]


class _Registered(ctypes.Structure):
    """PJRT_FFI_Register_Handler_Args."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("function", ctypes.c_void_p),
        ("platform", ctypes.c_char_p),
        ("platform_size", ctypes.c_size_t),
        ("traits", ctypes.c_int),
    ]


@functools.cache
def connect(platform: str) -> str | None:
    """Lets custom calls be registered with a platform's plugin, by `jax.ffi.register_ffi_target` with that platform.

    Returns:
      Why it cannot, or None. A handler that the plugin's own package has given to jaxlib stays.
    """
    from jax._src import xla_bridge
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    registration = xla_bridge._backend_factories.get(platform)
    if registration is None or platform not in xla_bridge.backends():
        return f"jax has no platform {platform}"
    if registration.c_api is None:
        return None  # built into jaxlib, which registers them itself
    api = _Api.from_address(_address(registration.c_api, b"pjrt_c_api"))
    extension = next((e for e in _extensions(api) if e.type == FFI), None)
    if extension is None:
        return "the plugin's PJRT C API has no FFI extension, which registers custom calls"
    if extension.struct_size < ctypes.sizeof(_FfiExtension):
        return (
            f"the FFI extension of the plugin's PJRT C API has {extension.struct_size} bytes, and custom calls are "
            f"registered by PJRT_FFI_Register_Handler, of {ctypes.sizeof(_FfiExtension)}"
        )
    ffi = _FfiExtension.from_address(ctypes.addressof(extension))
    if not ffi.register_handler:
        return "the FFI extension of the plugin's PJRT C API lacks PJRT_FFI_Register_Handler"
    # XLA looks functions up by the plugin's own platform name, which may differ from its registered one.
    itself = str(xla_bridge.backends()[platform].platform)
    xla_client.register_custom_call_handler(platform, functools.partial(_register, api, ffi, itself))
    return None


def _extensions(api: _Api) -> Iterator[_Extension]:
    found = api.extension
    while found:
        yield found.contents
        found = found.contents.next


def _register(
    api: _Api, ffi: _FfiExtension, itself: str, name: str | bytes, function: Any, _: str, api_version: int = 1, traits=0
) -> None:
    """Registers a function; the contract of `jaxlib.xla_client.CustomCallHandler`.

    Raises:
      NotImplementedError: it is not one typed function.
      RuntimeError: the plugin refuses it, and why.
    """
    if api_version != 1 or isinstance(function, dict):
        raise NotImplementedError(f"{name}: a plugin takes typed functions of one stage (api_version 1)")
    name = name.encode() if isinstance(name, str) else name
    # Names of capsules differ: None from `jax.ffi.pycapsule`, "xla._CUSTOM_CALL_TARGET" from others.
    address, platform = _address(function, _name(function)), itself.encode()
    arguments = _Registered(ctypes.sizeof(_Registered), name, len(name), address, platform, len(platform), int(traits))
    if error := _function(ffi.register_handler)(ctypes.byref(arguments)):
        raise RuntimeError(f"{name.decode()}: {_message(api, error)}")


def _message(api: _Api, error: int) -> str:
    """Returns the text of a PJRT_Error, which it destroys."""
    arguments = _Error(ctypes.sizeof(_Error), None, error)
    _function(api.error_message)(ctypes.byref(arguments))
    text = ctypes.string_at(arguments.text, arguments.text_size).decode(errors="replace")
    _function(api.error_destroy)(ctypes.byref(arguments))
    return text


def _function(address: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)


def _address(capsule: Any, name: bytes | None) -> int:
    found = ctypes.pythonapi.PyCapsule_GetPointer
    found.restype, found.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return found(capsule, name)


def _name(capsule: Any) -> bytes | None:
    found = ctypes.pythonapi.PyCapsule_GetName
    found.restype, found.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    return found(capsule)
