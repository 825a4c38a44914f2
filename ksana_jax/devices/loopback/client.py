"""Functions of the loopback plugin about the plugin itself, its client, errors and events."""

from __future__ import annotations

import ctypes
from typing import Any

from ksana_jax.core.loopback_options import LoopbackOptions
from ksana_jax.devices.loopback import abi
from ksana_jax.devices.loopback.hardware import Device, Topology
from ksana_jax.devices.loopback.marshal import Kept, Refused, read_named_values
from ksana_jax.devices.loopback.state import State


class Error(Kept):
    """A PJRT_Error."""

    def __init__(self, refused: Refused):
        super().__init__()
        self.code, self.message = abi.CODES[refused.code], refused.message


class ClientFunctions(State):
    """Functions about plugin, client, errors and events.

    Every event has happened when it is handed out: the CPU client computes before the function returns. One handle
    stands for all of them.
    """

    def fail(self, error: Exception) -> int:
        """Returns the handle of a PJRT_Error."""
        return self.handles.add(Error(Refused.of(error)))

    def Error_Destroy(self, args: Any) -> None:
        self.handles.drop(args.error)

    def Error_Message(self, args: Any) -> None:
        error = self.handles[args.error]
        args.message, args.message_size = error.text("message", error.message)

    def Error_GetCode(self, args: Any) -> None:
        args.code = self.handles[args.error].code

    def Error_ForEachPayload(self, args: Any) -> None:
        pass  # there are none

    def Plugin_Initialize(self, args: Any) -> None:
        pass

    def Plugin_Attributes(self, args: Any) -> None:
        values: dict[str, Any] = {"xla_version": 2}
        if self.options.stablehlo:
            values["stablehlo_current_version"] = [int(part) for part in self.options.stablehlo.split(".")]
        args.attributes, args.num_attributes = self.named("attributes", values)

    def Event_Destroy(self, args: Any) -> None:
        pass

    def Event_IsReady(self, args: Any) -> None:
        args.is_ready = True

    def Event_Error(self, args: Any) -> None:
        pass

    Event_Await = Event_Error

    def Event_OnReady(self, args: Any) -> None:
        abi.ON_READY(args.callback)(None, args.user_arg)

    def Client_Create(self, args: Any) -> None:
        from jaxlib import xla_client

        if given := read_named_values(args.create_options, args.num_options):
            self.options = LoopbackOptions.read(given)
        count = self.options.num_devices
        self.cpu = xla_client.make_cpu_client(asynchronous=False, num_devices=count)
        settings = (self.options.memory_bytes, self.options.pinned_host, self.handles)
        self.devices = [Device(self.platform, index, *settings) for index in range(count)]
        self.topology = Topology([device.description for device in self.devices], self.handles)
        args.client = self.handles.add(self)

    def Client_Destroy(self, args: Any) -> None:
        self.handles.drop(args.client)

    def Client_PlatformName(self, args: Any) -> None:
        args.text, args.text_size = self.text("platform", self.platform)

    def Client_PlatformVersion(self, args: Any) -> None:
        args.text, args.text_size = self.text("version", self.version)

    def Client_ProcessIndex(self, args: Any) -> None:
        args.process_index = 0

    def Client_Devices(self, args: Any) -> None:
        args.devices, args.num_devices = self.handle_array("devices", self.devices)

    Client_AddressableDevices = Client_Devices

    def Client_LookupDevice(self, args: Any) -> None:
        if not 0 <= args.id < len(self.devices):
            raise Refused("INVALID_ARGUMENT", f"there is no device {args.id}, only {len(self.devices)}")
        args.device = self.devices[args.id].handle

    Client_LookupAddressableDevice = Client_LookupDevice

    def Client_AddressableMemories(self, args: Any) -> None:
        memories = [memory for device in self.devices for memory in device.memories]
        args.memories, args.num_memories = self.handle_array("memories", memories)

    def Client_TopologyDescription(self, args: Any) -> None:
        assert self.topology is not None
        args.topology = self.topology.handle

    def Client_DefaultDeviceAssignment(self, args: Any) -> None:
        count = args.num_replicas * args.num_partitions
        if not count <= min(args.size, len(self.devices)):
            raise Refused("INVALID_ARGUMENT", f"{count} devices asked for, there are {len(self.devices)}")
        assigned = (ctypes.c_int * count).from_address(args.assignment)
        assigned[:] = range(count)
