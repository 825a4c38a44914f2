"""Functions of the loopback plugin about devices, memories and topologies."""

from __future__ import annotations

import ctypes
from typing import Any

from ksana_jax.devices.loopback import abi
from ksana_jax.devices.loopback.hardware import DEVICE
from ksana_jax.devices.loopback.state import State


class DeviceFunctions(State):
    """Functions about devices, memories and topologies."""

    def DeviceDescription_Id(self, args: Any) -> None:
        args.id = self.handles[args.description].index

    def DeviceDescription_ProcessIndex(self, args: Any) -> None:
        args.process_index = 0

    def DeviceDescription_Attributes(self, args: Any) -> None:
        found = self.handles[args.description].named("attributes", {"loopback": 1})
        args.attributes, args.num_attributes = found

    def DeviceDescription_Kind(self, args: Any) -> None:
        # No record can pass for a measurement of the hardware that the platform is named after.
        kind = f"loopback {self.platform} (CPU)"
        args.text, args.text_size = self.handles[args.description].text("kind", kind)

    def DeviceDescription_ToString(self, args: Any) -> None:
        found = self.handles[args.description]
        args.text, args.text_size = found.text("string", f"{self.platform}:{found.index}")

    DeviceDescription_DebugString = DeviceDescription_ToString

    def Device_GetDescription(self, args: Any) -> None:
        args.description = self.handles[args.device].description.handle

    def Device_IsAddressable(self, args: Any) -> None:
        args.is_addressable = True

    def Device_LocalHardwareId(self, args: Any) -> None:
        args.id = self.handles[args.device].index

    def Device_AddressableMemories(self, args: Any) -> None:
        device = self.handles[args.device]
        args.memories, args.num_memories = device.handle_array("memories", device.memories)

    def Device_DefaultMemory(self, args: Any) -> None:
        args.memory = self.handles[args.device].memory.handle

    def Device_MemoryStats(self, args: Any) -> None:
        device = self.handles[args.device]
        args.bytes_in_use = device.in_use
        for name, value in {"peak_bytes_in_use": device.peak, "largest_alloc_size": device.largest}.items():
            setattr(args, name, value)
        args.bytes_limit = device.limit
        args.peak_is_set = args.largest_is_set = args.bytes_limit_is_set = True
        for name in ("num_allocs", "reserved", "peak_reserved", "reservable", "largest_free", "pool", "peak_pool"):
            setattr(args, f"{name}_is_set", False)

    def Device_GetAttributes(self, args: Any) -> None:
        args.attributes, args.num_attributes, args.holder = None, 0, None
        args.deleter = self.deleter()

    def deleter(self) -> int | None:
        """Returns the address of a function that forgets the handle it is given."""
        drop = self.handles.drop
        function = self.keep("deleter", lambda: abi.DELETER(lambda handle: drop(handle) and None))
        return ctypes.cast(function, ctypes.c_void_p).value

    def Memory_Id(self, args: Any) -> None:
        args.id = self.handles[args.memory].id

    def Memory_Kind(self, args: Any) -> None:
        memory = self.handles[args.memory]
        args.text, args.text_size = memory.text("kind", memory.kind)

    def Memory_Kind_Id(self, args: Any) -> None:
        args.id = 1 + (self.handles[args.memory].kind != DEVICE)

    def Memory_ToString(self, args: Any) -> None:
        memory = self.handles[args.memory]
        args.text, args.text_size = memory.text("string", f"{memory.device.name} {memory.kind} memory")

    Memory_DebugString = Memory_ToString

    def Memory_AddressableByDevices(self, args: Any) -> None:
        memory = self.handles[args.memory]
        args.devices, args.num_devices = memory.handle_array("devices", [memory.device])

    # TopologyDescription_Create is not implemented: jaxlib compiles for a topology on a thread of its own, while the
    # calling thread waits for it and keeps Python's lock, for which the plugin's functions would wait forever.

    def TopologyDescription_Destroy(self, args: Any) -> None:
        pass  # the only one is the client's

    def TopologyDescription_PlatformName(self, args: Any) -> None:
        args.text, args.text_size = self.text("platform", self.platform)

    def TopologyDescription_PlatformVersion(self, args: Any) -> None:
        args.text, args.text_size = self.text("version", self.version)

    def TopologyDescription_GetDeviceDescriptions(self, args: Any) -> None:
        topology = self.handles[args.topology]
        args.descriptions, args.num_descriptions = topology.handle_array("descriptions", topology.descriptions)

    def TopologyDescription_Attributes(self, args: Any) -> None:
        args.attributes, args.num_attributes = self.handles[args.topology].named("attributes", {})

    def TopologyDescription_Fingerprint(self, args: Any) -> None:
        args.fingerprint = 1
