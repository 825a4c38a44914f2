"""What Mosaic GPU does on the host before it starts a kernel, read from the log of its passes."""

import pytest

from tests.emulator import TensorMap
from tests.emulator.host import read_launch

# An input [40, 128] in bfloat16, of which boxes of [8, 64] are copied, swizzled, and an output; shortened.
TENSOR_MAP = """
    %0 = llvm.mlir.constant(32776 : i32) : i32 loc(#loc1)
    %1 = llvm.mlir.constant(1 : i64) : i64 loc(#loc2)
    %2 = llvm.mlir.constant(2 : i64) : i64 loc(#loc2)
    %7 = llvm.mlir.constant(7 : i64) : i64 loc(#loc2)
    %8 = llvm.mlir.constant(8 : i64) : i64 loc(#loc2)
    %40 = llvm.mlir.constant(40 : i64) : i64 loc(#loc2)
    %64 = llvm.mlir.constant(64 : i64) : i64 loc(#loc2)
    %128 = llvm.mlir.constant(128 : index) : i64 loc(#loc2)
    %x = llvm.load %buffers : !llvm.ptr -> !llvm.ptr loc(#loc1)
    %9 = llvm.getelementptr %buffers[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr loc(#loc1)
    %out = llvm.load %9 : !llvm.ptr -> !llvm.ptr loc(#loc1)
    %10 = llvm.mlir.undef : !llvm.struct<(ptr, ptr, i64)> loc(#loc1)
    %11 = llvm.insertvalue %x, %10[1] : !llvm.struct<(ptr, ptr, i64)>  loc(#loc1)
    %maps = llvm.alloca %1 x !llvm.array<256 x i8> {alignment = 64 : i64} : (i64) -> !llvm.ptr loc(#loc6)
    %12 = llvm.extractvalue %11[1] : !llvm.struct<(ptr, ptr, i64)>  loc(#loc1)
    %13 = llvm.ptrtoint %12 : !llvm.ptr to i64 loc(#loc1)
    %14 = llvm.inttoptr %13 : i64 to !llvm.ptr loc(#loc1)
    %sizes = llvm.alloca %2 x i64 : (i64) -> !llvm.ptr loc(#loc1)
    llvm.store %40, %sizes : i64, !llvm.ptr loc(#loc1)
    %15 = llvm.getelementptr inbounds|nuw %sizes[%1] : (!llvm.ptr, i64) -> !llvm.ptr, i64 loc(#loc1)
    llvm.store %128, %15 : i64, !llvm.ptr loc(#loc1)
    %strides = llvm.alloca %2 x i64 : (i64) -> !llvm.ptr loc(#loc1)
    llvm.store %128, %strides : i64, !llvm.ptr loc(#loc1)
    %16 = llvm.getelementptr %strides[1] : (!llvm.ptr) -> !llvm.ptr, i64 loc(#loc1)
    llvm.store %1, %16 : i64, !llvm.ptr loc(#loc1)
    %box = llvm.alloca %2 x i64 : (i64) -> !llvm.ptr loc(#loc1)
    llvm.store %8, %box : i64, !llvm.ptr loc(#loc1)
    %17 = llvm.getelementptr %box[1] : (!llvm.ptr) -> !llvm.ptr, i64 loc(#loc1)
    llvm.store %64, %17 : i64, !llvm.ptr loc(#loc1)
    %18 = llvm.getelementptr %maps[128] : (!llvm.ptr) -> !llvm.ptr, i8 loc(#loc1)
    llvm.call @mosaic_gpu_init_tma_desc(%18, %14, %7, %2, %sizes, %strides, %128, %box) : (!llvm.ptr) -> () loc(#loc1)
    %19 = llvm.load %maps : !llvm.ptr -> !llvm.array<256 x i8> loc(#loc1)
    %fields = llvm.alloca %1 x !llvm.struct<(ptr, array<256 x i8>)> : (i64) -> !llvm.ptr loc(#loc1)
    %params = llvm.alloca %1 x !llvm.array<2 x i64> : (i64) -> !llvm.ptr loc(#loc1)
    %20 = llvm.getelementptr %fields[0, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(ptr, array<256 x i8>)> loc(#loc1)
    llvm.store %out, %20 : !llvm.ptr, !llvm.ptr loc(#loc1)
    %21 = llvm.getelementptr %params[0] : (!llvm.ptr) -> !llvm.ptr, i64 loc(#loc1)
    llvm.store %20, %21 : !llvm.ptr, !llvm.ptr loc(#loc1)
    %22 = llvm.getelementptr %params[1] : (!llvm.ptr) -> !llvm.ptr, i64 loc(#loc1)
    %30 = llvm.trunc %8 : i64 to i32 loc(#loc1)
    %31 = llvm.mlir.constant(0 : i32) : i32 loc(#loc1)
"""
JAX_0_10 = """
  llvm.func @double_mosaic_gpu(%arg0: !llvm.ptr loc(unknown), %arg1: !llvm.ptr loc("x"), %buffers: !llvm.ptr loc("x")) {
{body}
    %23 = llvm.getelementptr %fields[0, 1] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(ptr, array<256 x i8>)> loc(#loc1)
    llvm.store %19, %23 : !llvm.array<256 x i8>, !llvm.ptr loc(#loc1)
    llvm.store %23, %22 : !llvm.ptr, !llvm.ptr loc(#loc1)
    llvm.call @mosaic_gpu_launch_kernel(%arg0, %30, %1, %1, %31, %31, %31, %128, %1, %1, %0, %arg1, %params) : () -> ()
    llvm.return loc(#loc1)
"""
JAX_0_11 = JAX_0_10.replace("%0, %arg1, %params", "%0, %31, %arg1, %params")
JAX_0_12 = """
  llvm.func @double_mosaic_gpu(%arg0: !llvm.ptr loc(unknown), %buffers: !llvm.ptr loc("x")) {
{body}
    llvm.store %maps, %22 : !llvm.ptr, !llvm.ptr loc(#loc1)
    llvm.call @mosaic_gpu_build_kernel_spec(%arg0, %30, %1, %1, %31, %31, %31, %128, %1, %1, %0, %31, %2, %params, %9)
    llvm.return loc(#loc1)
"""


@pytest.mark.parametrize("text", [JAX_0_10, JAX_0_11, JAX_0_12], ids=["jax 0.10", "jax 0.11", "jax 0.12"])
def test_grid_parameters_and_tensor_maps_are_read(text):
    launch = read_launch(text.replace("{body}", TENSOR_MAP))
    assert (launch.grid, launch.threads, launch.shared_bytes) == ((8, 1, 1), (128, 1, 1), 32776)
    assert launch.params == [(1, 0), None]  # the output, and the tensor maps
    ((where, tensor),) = launch.tensor_maps.items()
    assert where == (1, 128) and tensor.buffer == 0
    assert tensor.at(1 << 40) == TensorMap(1 << 40, (40, 128), (128, 1), (8, 64), 2, 128)


def test_a_log_without_a_launch_is_an_error():
    with pytest.raises(ValueError, match="no launch in the log"):
        read_launch("llvm.func @x() {\n}\n")


def test_an_operation_that_is_not_known_is_an_error():
    text = JAX_0_10.replace("{body}", TENSOR_MAP + "    %77 = llvm.fadd %1, %1 : i64\n")
    with pytest.raises(ValueError, match=r"llvm\.fadd in a host function"):
        read_launch(text)
