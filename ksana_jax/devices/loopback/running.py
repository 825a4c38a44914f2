"""Runs programs of the loopback plugin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from ksana_jax.devices.loopback import abi
from ksana_jax.devices.loopback.buffers import Buffer, BufferFunctions
from ksana_jax.devices.loopback.client import ClientFunctions
from ksana_jax.devices.loopback.hardware import Device
from ksana_jax.devices.loopback.marshal import Kept, Refused, read_array
from ksana_jax.devices.loopback.programs import Loaded, ProgramFunctions


class RunningFunctions(ProgramFunctions, BufferFunctions, ClientFunctions):
    """The function that runs a program."""

    def ExecuteContext_Create(self, args: Any) -> None:
        args.context = self.handles.add(Kept())

    def ExecuteContext_Destroy(self, args: Any) -> None:
        self.handles.drop(args.context)

    def LoadedExecutable_Execute(self, args: Any) -> None:
        loaded: Loaded = self.handles[args.executable]
        if loaded.deleted:
            raise Refused("FAILED_PRECONDITION", "the program was deleted")
        options = abi.ExecuteOptions.from_address(args.options)
        kept = set(read_array(options.kept, options.num_kept, ctypes.c_int64))
        if "donation" in self.options.lacks:
            kept = set(range(args.num_args))
        rows = [read_array(row, args.num_args) for row in read_array(args.arguments, args.num_devices)]
        given = [[self.alive(handle) for handle in row] for row in rows]
        devices = [self.handles[args.device]] if args.device else loaded.devices
        memory = loaded.executable.memory
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        if "donation" in self.options.lacks:
            new += memory.alias_size_in_bytes
        claims: list[tuple[Device, int]] = []
        try:
            for device in devices:
                claims.append((device, device.claim(new, f"the program {loaded.executable.module.name}")))
            results = self._run(loaded, devices, given, kept)
        finally:
            for device, claim in claims:
                device.release(claim)
        for buffer in (buffer for row in given for buffer in row if buffer.array.is_deleted()):
            buffer.release()
        self._hand_over(args, devices, results)

    def _run(self, loaded: Loaded, devices: Sequence[Device], given: list[list[Buffer]], kept: set[int]) -> list[Any]:
        """Returns the results' arrays, one for each device in each."""
        arguments = []
        for index, buffers in enumerate(zip(*given)):
            arrays = [buffer.array for buffer in buffers]
            if index in kept:  # the CPU client would take over what the program may donate
                arrays = [self.put(buffer.values(), buffer.device) for buffer in buffers]
            arguments.append(arrays[0] if len(arrays) == 1 else self._together(arrays, devices))
        several = len(devices) > 1
        inner = loaded.executable.inner if several else self.compiled_for(loaded, devices[0])
        results = inner.execute_sharded(arguments).disassemble_into_single_device_arrays()
        # With several devices the CPU client returns before it has computed, whatever it was told.
        _jax.batched_block_until_ready([array for result in results for array in result])
        return results

    def _together(self, arrays: Sequence[Any], devices: Sequence[Device]) -> Any:
        """Returns one array of the shards of an argument; their sharding is the program's business."""
        mesh = Mesh(np.array([self.cpu.local_devices()[device.index] for device in devices]), "d")
        return jax.make_array_from_single_device_arrays(arrays[0].shape, NamedSharding(mesh, PartitionSpec()), arrays)

    def _hand_over(self, args: Any, devices: Sequence[Device], results: Sequence[Sequence[Any]]) -> None:
        for index, (row, device) in enumerate(zip(read_array(args.outputs, args.num_devices), devices)):
            if results:
                slots = (ctypes.c_void_p * len(results)).from_address(row)
                slots[:] = [self.handles.add(Buffer(result[index], device.memory)) for result in results]
        if args.done:
            done = (ctypes.c_void_p * args.num_devices).from_address(args.done)
            done[:] = [self.event()] * args.num_devices
