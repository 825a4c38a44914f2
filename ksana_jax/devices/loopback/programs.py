"""Programs of the loopback plugin: compiling them with jaxlib's CPU client, and what is said about them."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
from jaxlib import _hlo, _jax  # pyright: ignore[reportAttributeAccessIssue]

from ksana_jax.devices.loopback import abi, wire
from ksana_jax.devices.loopback.devices import DeviceFunctions
from ksana_jax.devices.loopback.hardware import Device
from ksana_jax.devices.loopback.marshal import Kept, Refused
from ksana_jax.devices.loopback.operations import check, operations_of


class Executable(Kept):
    """A compiled program. code, options: what it was compiled from; empty if it was deserialised."""

    def __init__(self, inner: Any, code: bytes, options: bytes):
        super().__init__()
        self.inner, self.code, self.options = inner, code, options
        [self.module] = inner.hlo_modules()
        self.memory = inner.get_compiled_memory_stats()
        self.fingerprint = hashlib.sha256(code or self.hlo()).hexdigest()

    @property
    def num_devices(self) -> int:
        return len(self.inner.local_devices())

    def hlo(self) -> bytes:
        """Returns the optimised module as an HloModuleProto."""
        return self.keep("hlo", self.module.as_serialized_hlo_module_proto)

    def results(self) -> list[Any]:
        """Returns the shape of each result."""

        def shapes() -> list[Any]:
            shape = _hlo.XlaComputation(self.hlo()).program_shape().result_shape()
            return list(shape.tuple_shapes()) if shape.is_tuple() else [shape]

        return self.keep("results", shapes)

    def program(self) -> bytes:
        """Returns an HloModuleProtoWithConfig: the module, and of its config what jaxlib insists on, the shape of the
        program and the numbers of replicas and partitions."""

        def encoded() -> bytes:
            shape = next(content for field, content in wire.bytes_fields(self.hlo()) if field == 4)
            config = wire.bytes_field(1, shape) + wire.number_field(4, 1) + wire.number_field(5, self.num_devices)
            return wire.bytes_field(1, self.hlo()) + wire.bytes_field(2, config)

        return self.keep("program", encoded)

    def assignment(self) -> bytes:
        """Returns the DeviceAssignmentProto; empty for a program that runs on any one device."""
        if not self.options or _jax.CompileOptions.ParseFromString(self.options).compile_portable_executable:
            return b""
        return _jax.DeviceAssignment.create(np.array([[d.id for d in self.inner.local_devices()]])).serialize()


class Loaded(Kept):
    """A program on its devices; one without a device assignment is compiled again for each other device."""

    def __init__(self, executable: Executable, devices: list[Device]):
        super().__init__()
        self.executable, self.devices, self.deleted = executable, devices, False
        self.elsewhere: dict[int, Any] = {}


class ProgramFunctions(DeviceFunctions):
    """Functions that compile programs and describe them."""

    def Client_Compile(self, args: Any) -> None:
        program = abi.Program.from_address(args.program)
        form = ctypes.string_at(program.format, program.format_size).decode()
        if form != "mlir":
            raise Refused("UNIMPLEMENTED", f"programs in form {form!r}: only mlir")
        code = ctypes.string_at(program.code, program.code_size)
        options = ctypes.string_at(args.options, args.options_size)
        parsed = _jax.CompileOptions.ParseFromString(options)
        if parsed.num_replicas > 1:
            raise Refused("UNIMPLEMENTED", f"{parsed.num_replicas} replicas of a program: only partitions")
        if self.records or self.options.lacks_operations:
            found = operations_of(code)
            for name, types in found.items() if self.records else ():
                self.operations.setdefault(name, set()).update(types)
            check(found, self.options.lacks_operations)
        executable = None if self.programs is None else self.programs.get((code, options))
        if executable is None:
            executable = Executable(self.cpu.compile_and_load(code, self._assigned(parsed), parsed), code, options)
        if self.programs is not None:
            self.programs[code, options] = executable
        args.executable = self._loaded(executable)

    def _assigned(self, parsed: Any) -> list[Any]:
        """Returns the CPU client's devices that options assign a program to, the first ones where they assign none."""
        devices = self.cpu.local_devices()
        if parsed.device_assignment is None:
            return devices[: max(1, parsed.num_replicas) * max(1, parsed.num_partitions)]
        computations = wire.bytes_fields(parsed.device_assignment.serialize())
        packed = [ids for _, computation in computations for _, ids in wire.bytes_fields(computation)]
        return [devices[number] for ids in packed for number in wire.numbers(ids)]

    def _loaded(self, executable: Executable) -> int:
        ids = {inner.id: device for inner, device in zip(self.cpu.local_devices(), self.devices)}
        devices = [ids[inner.id] for inner in executable.inner.local_devices()]
        return self.handles.add(Loaded(executable, devices))

    def compiled_for(self, loaded: Loaded, device: Device) -> Any:
        """Returns the CPU client's executable of a program for one device."""
        if device in loaded.devices:
            return loaded.executable.inner
        if device.index not in loaded.elsewhere:
            parsed = _jax.CompileOptions.ParseFromString(loaded.executable.options)
            inner = self.cpu.local_devices()[device.index]
            loaded.elsewhere[device.index] = self.cpu.compile_and_load(loaded.executable.code, [inner], parsed)
        return loaded.elsewhere[device.index]

    def Executable_DeserializeAndLoad(self, args: Any) -> None:
        data, parsed = ctypes.string_at(args.data, args.data_size), None
        if args.options_size:
            parsed = _jax.CompileOptions.ParseFromString(ctypes.string_at(args.options, args.options_size))
        devices = self.cpu.local_devices()[: max(1, parsed.num_partitions) if parsed else 1]
        args.loaded = self._loaded(Executable(self.cpu.deserialize_executable(data, devices, parsed), b"", b""))

    def LoadedExecutable_Destroy(self, args: Any) -> None:
        self.handles.drop(args.executable)

    def LoadedExecutable_GetExecutable(self, args: Any) -> None:
        # The caller destroys what it gets: one more handle of the same program.
        args.executable = self.handles.add(self.handles[args.loaded].executable)

    def LoadedExecutable_AddressableDevices(self, args: Any) -> None:
        loaded = self.handles[args.executable]
        args.devices, args.num_devices = loaded.handle_array("devices", loaded.devices)

    def LoadedExecutable_AddressableDeviceLogicalIds(self, args: Any) -> None:
        loaded = self.handles[args.executable]
        ids = [number for partition in range(len(loaded.devices)) for number in (0, partition)]
        args.ids, _ = loaded.c_array("ids", ctypes.c_int, ids)
        args.n = len(loaded.devices)

    def LoadedExecutable_GetDeviceAssignment(self, args: Any) -> None:
        self._hand_out(args, self.handles[args.executable].executable.assignment())

    def LoadedExecutable_Delete(self, args: Any) -> None:
        self.handles[args.executable].deleted = True

    def LoadedExecutable_IsDeleted(self, args: Any) -> None:
        args.is_deleted = self.handles[args.executable].deleted

    def LoadedExecutable_Fingerprint(self, args: Any) -> None:
        loaded = self.handles[args.executable]
        args.text, args.text_size = loaded.text("fingerprint", loaded.executable.fingerprint)

    def Executable_Destroy(self, args: Any) -> None:
        self.handles.drop(args.executable)

    def Executable_Name(self, args: Any) -> None:
        found = self.handles[args.executable]
        args.text, args.text_size = found.text("name", found.module.name)

    def Executable_NumReplicas(self, args: Any) -> None:
        args.n = 1

    def Executable_NumPartitions(self, args: Any) -> None:
        args.n = self.handles[args.executable].num_devices

    def Executable_NumOutputs(self, args: Any) -> None:
        args.n = len(self.handles[args.executable].results())

    def Executable_SizeOfGeneratedCodeInBytes(self, args: Any) -> None:
        args.size = self.handles[args.executable].inner.size_of_generated_code_in_bytes()

    def Executable_Fingerprint(self, args: Any) -> None:
        found = self.handles[args.executable]
        args.text, args.text_size = found.text("fingerprint", found.fingerprint)

    def Executable_GetCostAnalysis(self, args: Any) -> None:
        found = self.handles[args.executable]
        args.properties, args.num_properties = found.named("cost", found.inner.cost_analysis())

    def Executable_GetCompiledMemoryStats(self, args: Any) -> None:
        memory = self.handles[args.executable].memory
        args.code, args.argument = memory.generated_code_size_in_bytes, memory.argument_size_in_bytes
        args.output, args.alias = memory.output_size_in_bytes, memory.alias_size_in_bytes
        args.temp, args.peak = memory.temp_size_in_bytes, memory.peak_memory_in_bytes
        args.host_code = args.host_argument = args.host_output = args.host_alias = args.host_temp = 0

    def Executable_OutputMemoryKinds(self, args: Any) -> None:
        found = self.handles[args.executable]
        address, size = found.text("memory kind", "device")
        count = len(found.results())
        args.kinds, args.n = found.c_array("memory kinds", ctypes.c_void_p, [address] * count)
        args.kind_sizes, _ = found.c_array("sizes of memory kinds", ctypes.c_size_t, [size] * count)

    def Executable_OutputElementTypes(self, args: Any) -> None:
        found = self.handles[args.executable]
        types = [abi.TYPES[np.dtype(shape.numpy_dtype())] for shape in found.results()]
        args.types, args.n = found.c_array("types", ctypes.c_int, types)

    def Executable_OutputDimensions(self, args: Any) -> None:
        found = self.handles[args.executable]
        shapes = [shape.dimensions() for shape in found.results()]
        args.dims, _ = found.c_array("dims", ctypes.c_int64, [size for shape in shapes for size in shape])
        args.dim_sizes, args.n = found.c_array("numbers of dims", ctypes.c_size_t, [len(shape) for shape in shapes])

    def Executable_OptimizedProgram(self, args: Any) -> None:
        program, found = abi.Program.from_address(args.program), self.handles[args.executable]
        code = found.program()
        program.format, program.format_size = self.text("format", "hlo_with_config")
        if program.code:  # the second call brings memory
            ctypes.memmove(program.code, code, len(code))
        else:
            program.code_size = len(code)

    def Executable_Serialize(self, args: Any) -> None:
        self._hand_out(args, self.cpu.serialize_executable(self.handles[args.executable].inner))

    def Executable_GetCompileOptions(self, args: Any) -> None:
        self._hand_out(args, self.handles[args.executable].options)

    def _hand_out(self, args: Any, data: bytes) -> None:
        """Gives the caller bytes, which it returns through the deleter."""
        holder = Kept()
        buffer = holder.keep("data", lambda: ctypes.create_string_buffer(data, len(data) + 1))
        args.data, args.data_size = ctypes.addressof(buffer), len(data)
        args.holder, args.deleter = self.handles.add(holder), self.deleter()
