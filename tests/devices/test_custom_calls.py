"""Registering custom calls with a plugin; here its C API is a table of ours."""

import ctypes
import types

import jax
import pytest
from jax._src import xla_bridge
from jax._src.lib import xla_client

from ksana_jax.devices import custom_calls
from ksana_jax.devices.custom_calls import _Api, _Error, _Extension, _FfiExtension, _Registered, connect

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Plugin:
    """A C API with an FFI extension, behind another one, for a client that calls itself "host".

    answers: whether functions are registered; else an error is returned.
    """

    def __init__(self, answers=True):
        self.registered, self.destroyed, self.text = [], 0, b"not today"
        self.functions = [FUNCTION(f) for f in (self.destroy, self.message, self.register if answers else lambda _: 7)]
        destroy, message, register = (ctypes.cast(f, ctypes.c_void_p) for f in self.functions)
        self.ffi = _FfiExtension((ctypes.sizeof(_FfiExtension), custom_calls.FFI, None), None, None, register)
        self.other = _Extension(ctypes.sizeof(_Extension), 3, ctypes.pointer(self.ffi.base))
        self.api = _Api(0, ctypes.pointer(self.other), (0, 0, 0), destroy, message)

    def register(self, address):
        found = _Registered.from_address(address)
        self.registered.append((found.name, found.function, found.platform, found.traits))

    def destroy(self, address):
        self.destroyed += _Error.from_address(address).error == 7

    def message(self, address):
        found = _Error.from_address(address)
        found.text, found.text_size = ctypes.cast(self.text, ctypes.c_void_p), len(self.text)


@pytest.fixture
def connected(monkeypatch):
    """Returns what `connect` says of a plugin that is registered as "acc"."""

    def connected(plugin):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        registration = types.SimpleNamespace(c_api=new(ctypes.addressof(plugin.api), b"pjrt_c_api", None))
        monkeypatch.setitem(xla_bridge._backend_factories, "acc", registration)
        backends = {**xla_bridge.backends(), "acc": types.SimpleNamespace(platform="host")}
        monkeypatch.setattr(xla_bridge, "backends", lambda: backends)
        return connect("acc")

    yield connected
    xla_client._custom_callback_handler.pop("acc", None)
    connect.cache_clear()


def test_functions_reach_the_plugin_under_the_name_that_it_gives_itself(connected):
    plugin = Plugin()
    first, second = (jax.ffi.pycapsule(ctypes.cast(plugin.functions[i], ctypes.c_void_p)) for i in (0, 1))
    jax.ffi.register_ffi_target("early", first, platform="acc")
    assert connected(plugin) is None
    jax.ffi.register_ffi_target("late", second, platform="acc")
    addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in plugin.functions]
    assert plugin.registered == [(b"early", addresses[0], b"host", 0), (b"late", addresses[1], b"host", 0)]


def test_what_a_plugin_refuses_is_an_error_with_its_text(connected):
    plugin = Plugin(answers=False)
    assert connected(plugin) is None
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(1))
    with pytest.raises(RuntimeError, match="mine: not today"):
        jax.ffi.register_ffi_target("mine", capsule, platform="acc")
    assert plugin.destroyed == 1
    with pytest.raises(NotImplementedError, match="mine: a plugin takes typed functions of one stage"):
        jax.ffi.register_ffi_target("mine", {"execute": capsule}, platform="acc")


def test_what_the_c_api_lacks_is_named(connected):
    plugin = Plugin()
    plugin.ffi.register_handler = None
    assert connected(plugin) == "the FFI extension of the plugin's PJRT C API lacks PJRT_FFI_Register_Handler"
    connect.cache_clear()
    plugin.ffi.base.struct_size -= 8
    assert "has 40 bytes, and custom calls are registered by PJRT_FFI_Register_Handler" in str(connected(plugin))
    connect.cache_clear()
    plugin.other.next = None
    assert connected(plugin) == "the plugin's PJRT C API has no FFI extension, which registers custom calls"


def test_jaxs_own_cpu_needs_nothing_and_an_unknown_platform_is_named():
    assert connect("cpu") is None
    assert connect("acc") == "jax has no platform acc"
