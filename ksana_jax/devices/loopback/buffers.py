"""Buffers of the loopback plugin: arrays of jaxlib's CPU client, counted in the memory of a loopback device."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from ksana_jax.devices.loopback import abi
from ksana_jax.devices.loopback.hardware import DEVICE, Device, Memory
from ksana_jax.devices.loopback.marshal import Kept, Refused, read_array
from ksana_jax.devices.loopback.state import State


class Buffer(Kept):
    """An array on a device. Donating it to the CPU client deletes `array`, and so the buffer."""

    def __init__(self, array: Any, memory: Memory):
        super().__init__()
        self.array, self.memory, self.device = array, memory, memory.device
        self.shape, self.dtype = array.shape, array.dtype
        self.size = math.prod(self.shape) * self.dtype.itemsize
        what = f"an array {self.dtype}{list(self.shape)}"
        self._claim = self.device.claim(self.size, what) if memory.kind == DEVICE else None

    def release(self) -> None:
        """Gives its memory back; once more does nothing."""
        if self._claim is not None:
            self.device.release(self._claim)

    @property
    def address(self) -> int:
        return self.array.unsafe_buffer_pointer()

    def values(self) -> np.ndarray:
        """Returns a copy. `np.asarray(self.array)` would refer to the array, which could then not be donated."""
        values = np.empty(self.shape, self.dtype)
        ctypes.memmove(values.ctypes.data, self.address, self.size)
        return values


class BufferFunctions(State):
    """Functions about buffers."""

    def put(self, value: np.ndarray, device: Device) -> Any:
        """Returns an array of the CPU client with the values of a NumPy array.

        Its memory is its own, never the NumPy array's: the CPU client could not donate that.
        """
        inner = self.cpu.local_devices()[device.index]
        aval = ShapedArray(value.shape, value.dtype)
        sharding, copies = _jax.SingleDeviceSharding(inner), _jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
        return _jax.batched_device_put(aval, sharding, [value], [inner], host_buffer_semantics=copies, enable_x64=True)

    def alive(self, handle: int) -> Buffer:
        """Returns a buffer that has not been deleted.

        Raises:
          Refused: it has been, or was donated.
        """
        buffer = self.handles[handle]
        if buffer.array.is_deleted():
            raise Refused("INVALID_ARGUMENT", "the array was deleted or donated")
        return buffer

    def Client_BufferFromHostBuffer(self, args: Any) -> None:
        dtype = abi.DTYPES.get(args.type)
        if dtype is None:
            raise Refused("UNIMPLEMENTED", f"arrays of PJRT_Buffer_Type {args.type}")
        shape = tuple(read_array(args.dims, args.num_dims, ctypes.c_int64))
        strides = read_array(args.strides, args.num_strides, ctypes.c_int64) or None
        value = np.empty(shape, dtype)
        if value.size:
            span = value.nbytes
            if strides is not None:
                span = sum((n - 1) * stride for n, stride in zip(shape, strides)) + dtype.itemsize
            given = (ctypes.c_char * span).from_address(args.data)
            value = np.array(
                np.ndarray(shape, dtype, memoryview(given), strides=strides), copy=strides is not None, order="C"
            )
        memory = self.handles[args.memory] if args.memory else self.handles[args.device].memory
        args.buffer = self.handles.add(Buffer(self.put(value, memory.device), memory))
        args.done = self.event()

    def Buffer_Destroy(self, args: Any) -> None:
        buffer = self.handles.drop(args.buffer)
        if buffer is not None:
            buffer.release()

    def Buffer_Delete(self, args: Any) -> None:
        buffer = self.handles[args.buffer]
        buffer.release()
        buffer.array.delete()

    def Buffer_IsDeleted(self, args: Any) -> None:
        args.is_deleted = self.handles[args.buffer].array.is_deleted()

    def Buffer_ElementType(self, args: Any) -> None:
        args.type = abi.TYPES[self.handles[args.buffer].dtype]

    def Buffer_Dimensions(self, args: Any) -> None:
        buffer = self.handles[args.buffer]
        args.dims, args.num_dims = buffer.c_array("dims", ctypes.c_int64, buffer.shape)

    Buffer_UnpaddedDimensions = Buffer_Dimensions

    def Buffer_DynamicDimensionIndices(self, args: Any) -> None:
        args.dims, args.num_dims = None, 0

    def Buffer_OnDeviceSizeInBytes(self, args: Any) -> None:
        args.size = self.handles[args.buffer].size

    def Buffer_Device(self, args: Any) -> None:
        args.device = self.handles[args.buffer].device.handle

    def Buffer_Memory(self, args: Any) -> None:
        args.memory = self.handles[args.buffer].memory.handle

    def Buffer_IsOnCpu(self, args: Any) -> None:
        args.is_on_cpu = False  # else jax would read it where it is

    def Buffer_ReadyEvent(self, args: Any) -> None:
        args.event = self.event()

    def Buffer_UnsafePointer(self, args: Any) -> None:
        args.pointer = self.alive(args.buffer).address

    Buffer_OpaqueDeviceMemoryDataPointer = Buffer_UnsafePointer

    def Buffer_IncreaseExternalReferenceCount(self, args: Any) -> None:
        pass

    Buffer_DecreaseExternalReferenceCount = Buffer_IncreaseExternalReferenceCount

    def Buffer_ToHostBuffer(self, args: Any) -> None:
        buffer = self.alive(args.src)
        if not args.dst:  # asks for the size
            args.dst_size = buffer.size
            return
        if args.dst_size < buffer.size:
            raise Refused("INVALID_ARGUMENT", f"{buffer.size} bytes do not fit in {args.dst_size}")
        ctypes.memmove(args.dst, buffer.address, buffer.size)
        args.event = self.event()

    def Buffer_CopyRawToHost(self, args: Any) -> None:
        buffer = self.alive(args.buffer)
        if not 0 <= args.offset <= args.offset + args.size <= buffer.size:
            raise Refused("OUT_OF_RANGE", f"{args.size} bytes from {args.offset} of an array of {buffer.size}")
        ctypes.memmove(args.dst, buffer.address + args.offset, args.size)
        args.event = self.event()

    def Buffer_CopyToDevice(self, args: Any) -> None:
        args.out = self._copy(self.alive(args.buffer), self.handles[args.device].memory)

    def Buffer_CopyToMemory(self, args: Any) -> None:
        args.out = self._copy(self.alive(args.buffer), self.handles[args.memory])

    def _copy(self, buffer: Buffer, memory: Memory) -> int:
        return self.handles.add(Buffer(self.put(buffer.values(), memory.device), memory))
