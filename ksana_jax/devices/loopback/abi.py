"""The PJRT C API as ctypes: its table of functions, and the struct of arguments of each.

Every function takes a pointer to its struct, writes results into it, and returns a PJRT_Error* or NULL. All structs
begin with (size_t struct_size, void* extension_start). Order and fields are those of pjrt_c_api.h, version 0.112;
handles are opaque to the caller up to version 0.104, which is what the loopback reports.
"""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np

MAJOR, MINOR = 0, 104

# Fields by type: p pointer or handle, z size_t, i int, q int64, b bool, u uint64. Functions without fields are those
# that the loopback does not implement.
_TABLE = """
Error_Destroy error:p
Error_Message error:p message:p message_size:z
Error_GetCode error:p code:i
Plugin_Initialize
Plugin_Attributes attributes:p num_attributes:z
Event_Destroy event:p
Event_IsReady event:p is_ready:b
Event_Error event:p
Event_Await event:p
Event_OnReady event:p callback:p user_arg:p
Client_Create create_options:p num_options:z kv_get:p kv_get_arg:p kv_put:p kv_put_arg:p client:p kv_try:p \
  kv_try_arg:p
Client_Destroy client:p
Client_PlatformName client:p text:p text_size:z
Client_ProcessIndex client:p process_index:i
Client_PlatformVersion client:p text:p text_size:z
Client_Devices client:p devices:p num_devices:z
Client_AddressableDevices client:p devices:p num_devices:z
Client_LookupDevice client:p id:i device:p
Client_LookupAddressableDevice client:p id:i device:p
Client_AddressableMemories client:p memories:p num_memories:z
Client_Compile client:p program:p options:p options_size:z executable:p
Client_DefaultDeviceAssignment client:p num_replicas:i num_partitions:i size:z assignment:p
Client_BufferFromHostBuffer client:p data:p type:i dims:p num_dims:z strides:p num_strides:z semantics:i device:p \
  memory:p layout:p done:p buffer:p
DeviceDescription_Id description:p id:i
DeviceDescription_ProcessIndex description:p process_index:i
DeviceDescription_Attributes description:p num_attributes:z attributes:p
DeviceDescription_Kind description:p text:p text_size:z
DeviceDescription_DebugString description:p text:p text_size:z
DeviceDescription_ToString description:p text:p text_size:z
Device_GetDescription device:p description:p
Device_IsAddressable device:p is_addressable:b
Device_LocalHardwareId device:p id:i
Device_AddressableMemories device:p memories:p num_memories:z
Device_DefaultMemory device:p memory:p
Device_MemoryStats device:p bytes_in_use:q peak_bytes_in_use:q peak_is_set:b num_allocs:q num_allocs_is_set:b \
  largest_alloc_size:q largest_is_set:b bytes_limit:q bytes_limit_is_set:b reserved:q reserved_is_set:b \
  peak_reserved:q peak_reserved_is_set:b reservable:q reservable_is_set:b largest_free:q largest_free_is_set:b \
  pool:q pool_is_set:b peak_pool:q peak_pool_is_set:b
Memory_Id memory:p id:i
Memory_Kind memory:p text:p text_size:z
Memory_DebugString memory:p text:p text_size:z
Memory_ToString memory:p text:p text_size:z
Memory_AddressableByDevices memory:p devices:p num_devices:z
Executable_Destroy executable:p
Executable_Name executable:p text:p text_size:z
Executable_NumReplicas executable:p n:z
Executable_NumPartitions executable:p n:z
Executable_NumOutputs executable:p n:z
Executable_SizeOfGeneratedCodeInBytes executable:p size:q
Executable_GetCostAnalysis executable:p num_properties:z properties:p
Executable_OutputMemoryKinds executable:p n:z kinds:p kind_sizes:p
Executable_OptimizedProgram executable:p program:p
Executable_Serialize executable:p data:p data_size:z holder:p deleter:p
LoadedExecutable_Destroy executable:p
LoadedExecutable_GetExecutable loaded:p executable:p
LoadedExecutable_AddressableDevices executable:p devices:p num_devices:z
LoadedExecutable_Delete executable:p
LoadedExecutable_IsDeleted executable:p is_deleted:b
LoadedExecutable_Execute executable:p options:p arguments:p num_devices:z num_args:z outputs:p done:p device:p
Executable_DeserializeAndLoad client:p data:p data_size:z loaded:p options:p options_size:z load_options:p
LoadedExecutable_Fingerprint executable:p text:p text_size:z
Buffer_Destroy buffer:p
Buffer_ElementType buffer:p type:i
Buffer_Dimensions buffer:p dims:p num_dims:z
Buffer_UnpaddedDimensions buffer:p dims:p num_dims:z
Buffer_DynamicDimensionIndices buffer:p dims:p num_dims:z
Buffer_GetMemoryLayout
Buffer_OnDeviceSizeInBytes buffer:p size:z
Buffer_Device buffer:p device:p
Buffer_Memory buffer:p memory:p
Buffer_Delete buffer:p
Buffer_IsDeleted buffer:p is_deleted:b
Buffer_CopyToDevice buffer:p device:p out:p
Buffer_ToHostBuffer src:p host_layout:p dst:p dst_size:z event:p
Buffer_IsOnCpu buffer:p is_on_cpu:b
Buffer_ReadyEvent buffer:p event:p
Buffer_UnsafePointer buffer:p pointer:p
Buffer_IncreaseExternalReferenceCount buffer:p
Buffer_DecreaseExternalReferenceCount buffer:p
Buffer_OpaqueDeviceMemoryDataPointer buffer:p pointer:p
CopyToDeviceStream_Destroy
CopyToDeviceStream_AddChunk
CopyToDeviceStream_TotalBytes
CopyToDeviceStream_GranuleSize
CopyToDeviceStream_CurrentBytes
TopologyDescription_Create name:p name_size:z options:p num_options:z topology:p
TopologyDescription_Destroy topology:p
TopologyDescription_PlatformName topology:p text:p text_size:z
TopologyDescription_PlatformVersion topology:p text:p text_size:z
TopologyDescription_GetDeviceDescriptions topology:p descriptions:p num_descriptions:z
TopologyDescription_Serialize
TopologyDescription_Attributes topology:p attributes:p num_attributes:z
Compile topology:p program:p options:p options_size:z client:p executable:p
Executable_OutputElementTypes executable:p types:p n:z
Executable_OutputDimensions executable:p n:z dims:p dim_sizes:p
Buffer_CopyToMemory buffer:p memory:p out:p
Client_CreateViewOfDeviceBuffer
Executable_Fingerprint executable:p text:p text_size:z
Client_TopologyDescription client:p topology:p
Executable_GetCompiledMemoryStats executable:p code:q argument:q output:q alias:q temp:q host_code:q \
  host_argument:q host_output:q host_alias:q host_temp:q peak:q total:q total_allocation:q indefinite:q \
  peak_unpadded:q
Memory_Kind_Id memory:p id:i
ExecuteContext_Create context:p
ExecuteContext_Destroy context:p
Buffer_CopyRawToHost buffer:p dst:p offset:q size:q event:p
AsyncHostToDeviceTransferManager_Destroy
AsyncHostToDeviceTransferManager_TransferData
Client_CreateBuffersForAsyncHostToDevice
AsyncHostToDeviceTransferManager_RetrieveBuffer
AsyncHostToDeviceTransferManager_Device
AsyncHostToDeviceTransferManager_BufferCount
AsyncHostToDeviceTransferManager_BufferSize
AsyncHostToDeviceTransferManager_SetBufferError
AsyncHostToDeviceTransferManager_AddMetadata
Client_DmaMap
Client_DmaUnmap
Client_CreateUninitializedBuffer
Client_UpdateGlobalProcessInfo
TopologyDescription_Deserialize
Client_CreateAliasBuffer
Client_FulfillAliasBuffer
LoadedExecutable_GetDeviceAssignment executable:p data:p data_size:z holder:p deleter:p
Client_CreateErrorBuffer
AsyncHostToDeviceTransferManager_TransferLiteral
Buffer_CopyRawToHostFuture
Device_PoisonExecution
Device_CreateAsyncTrackingEvent
AsyncTrackingEvent_Destroy
Executable_GetCompileOptions executable:p data:p data_size:z holder:p deleter:p
Buffer_DonateWithControlDependency
Event_Create
Event_Set
Device_GetAttributes device:p attributes:p num_attributes:z holder:p deleter:p
Client_Load client:p executable:p options:p options_size:z loaded:p
LoadedExecutable_AddressableDeviceLogicalIds executable:p ids:p n:z
Buffer_Bitcast
Error_ForEachPayload error:p visitor:p user_arg:p
TopologyDescription_Fingerprint topology:p fingerprint:u
Executable_ParameterMemoryKinds executable:p n:z kinds:p kind_sizes:p
Device_ClearMemoryStats device:p
TopologyDescription_MakeCanonicalShapeForMemorySpace
TopologyDescription_GetMemorySpaceKindIds
"""

_CTYPES = {
    "p": ctypes.c_void_p,
    "z": ctypes.c_size_t,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "b": ctypes.c_bool,
    "u": ctypes.c_uint64,
}
_HEAD = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]


def _struct(name: str, fields: list[str]) -> type[ctypes.Structure]:
    typed = [(field[:-2], _CTYPES[field[-1]]) for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": _HEAD + typed})


# {name of a function: its struct of arguments}, in the order of the table.
ARGUMENTS = {name: _struct(name, fields) for name, *fields in map(str.split, _TABLE.strip().splitlines())}
Program = _struct("Program", ["code:p", "code_size:z", "format:p", "format_size:z"])
ExecuteOptions = _struct(
    "ExecuteOptions",
    ["send:p", "recv:p", "num_send:z", "num_recv:z", "launch_id:i", "kept:p", "num_kept:z", "context:p"],
)


class Api(ctypes.Structure):
    """PJRT_Api: version and functions."""

    _fields_ = [
        *_HEAD,
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("functions", ctypes.c_void_p * len(ARGUMENTS)),
    ]


class _Value(ctypes.Union):
    _fields_ = [
        ("text", ctypes.c_void_p),
        ("integer", ctypes.c_int64),
        ("integers", ctypes.c_void_p),
        ("number", ctypes.c_float),
        ("truth", ctypes.c_bool),
    ]


class NamedValue(ctypes.Structure):
    """PJRT_NamedValue: an option or an attribute. type: 0 text, 1 int64, 2 list of int64, 3 float, 4 bool."""

    _fields_ = [
        *_HEAD,
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", _Value),
        ("value_size", ctypes.c_size_t),
    ]


FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
ON_READY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# absl::StatusCode.
CODES = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
}
_FLOAT8 = ["float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e4m3fnuz"]
_NAMES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"]
_NAMES += ["float64", "bfloat16", "complex64", "complex128", *_FLOAT8]
# PJRT_Buffer_Type of each dtype; types of less than a byte, which follow, are not implemented.
TYPES = {np.dtype(getattr(ml_dtypes, name, name)): number for number, name in enumerate(_NAMES, start=1)}
DTYPES = {number: dtype for dtype, number in TYPES.items()}
