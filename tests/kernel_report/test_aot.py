"""Compilation for a GPU that is not there: what compilers say is read and judged rightly, and they do compile."""

import dataclasses
import functools
import json
import os
import signal
import time
from collections import Counter

import pytest

from ksana_jax.lab.trace.collectives import Collective, find_collectives
from pallas_kernels import aot
from tests.kernel_report import check, report
from tests.kernel_report.__main__ import main
from tests.kernel_report.check import Case
from tests.kernel_report.report import Memory

needs_plugin = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))

SPILLING = """
ptxas info    : Overriding maximum register limit 256 for 'decode' with  72 of maxrregcount option
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    16 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compile time = 52.898 ms
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 68 registers, used 2 barriers, 1 bytes smem
"""
THUNKS = """
001: kCustomKernel [source       | next=002 (1)] decode grid: [768, 1, 1] threads: [64,1,1]  shared_memory: 7168 bytes
002: kCustomCall   [prev=001 (1) | next=004 (1)] kCustomCall
"""
CAPTURED = """
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=002 (1)] decode grid: [768, 1, 1] threads: [64,1,1]  shared_memory: 0 bytes
    002: kCustomCall   [prev=001 (1) | sink        ] kCustomCall
003: kCopy [source | sink]
004: kWhile [source | sink]
    005: kSort [source | sink]
006: kCommandBuffer [source | sink]
    007: kMemzero [source | sink]
"""
# The first launch of a log has names of values where later ones have numbers.
PASSES = """
 %82 = gpu.launch async [%4] blocks(%83, %84, %85) in (%89 = %m_3, %90 = %c1, %91 = %c1) threads(%86, %87, %88) in \
(%92 = %m_2, %93 = %c1, %94 = %c1) dynamic_shared_memory_size %m_1 {
 %55 = gpu.launch async [%2] blocks(%15, %16, %17) in (%21 = %c264, %22 = %c1, %23 = %c1_0) threads(%18, %19, %20) in \
(%24 = %c128, %25 = %c2, %26 = %c1) dynamic_shared_memory_size %c32776_i32 {
"""
# An array that is stored by columns and of which 4 rows are copied; one that is a single tile wide, and one of
# whole swizzle atoms.
SPLIT = """
 %263 = builtin.unrealized_conversion_cast %view_89 : memref<16x2x4x64xbf16, #gpu.address_space<workgroup>> to \
memref<64x128xbf16, #gpu.address_space<workgroup>> {transforms = [#mosaic_gpu.tile<[4, 64]>, \
#mosaic_gpu.swizzle<128 : i32>]} loc(#loc69)
 %268 = builtin.unrealized_conversion_cast %view_90 : memref<2x16x1x4x64xf16, #gpu.address_space<workgroup>> to \
memref<2x64x64xf16, #gpu.address_space<workgroup>> {transforms = [#mosaic_gpu.tile<[4, 64]>, \
#mosaic_gpu.swizzle<128 : i32>]} loc(#loc70)
 %972 = builtin.unrealized_conversion_cast %view_385 : memref<2x8x2x8x32xf32, #gpu.address_space<workgroup>> to \
memref<2x64x64xf32, #gpu.address_space<workgroup>> {transforms = [#mosaic_gpu.tile<[8, 32]>, \
#mosaic_gpu.swizzle<128 : i32>]} loc(#loc248)
"""
PTX = """
 wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];
 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];
 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1];
 cp.async.bulk.commit_group;
 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
 cp.async.wait_group 0x1;
"""
SERIALISED = (
    "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
    "instructions defining input registers of a wgmma between start and end of the pipeline stage in the function "
    "'merge' in line 0\n"
)
POOL = (1024, 2, 2, 8, 64, 128)
COPIED = """
%fused_dynamic_update_slice (param_0.3: bf16[1024,2,2,8,64,128], param_1.19: s32[]) -> bf16[1024,2,2,8,64,128] {
  %param_0.3 = bf16[1024,2,2,8,64,128]{5,4,3,2,1,0} parameter(0), metadata={scheduling_name="param_0.3"}
  ROOT %dynamic-update-slice.2.1 = bf16[1024,2,2,8,64,128]{5,4,3,2,1,0} dynamic-update-slice(%param_0.3, %select.1.3)
}

ENTRY %main.2 (p.1: bf16[1024,2,2,8,64,128], i.1: s32[]) -> bf16[1024,2,2,8,64,128] {
  %p.1 = bf16[1024,2,2,8,64,128]{5,4,3,2,1,0} parameter(0), metadata={op_name="p" scheduling_name="p.1"}
  %copy.14 = bf16[1024,2,2,8,64,128]{5,4,3,2,1,0} copy(%p.1)
  ROOT %fusion = bf16[1024,2,2,8,64,128]{5,4,3,2,1,0} fusion(%copy.14), kind=kLoop, calls=%fused_dynamic_update_slice
}
"""
# Keys and values of a layer are cut out for a matrix product: two results of one fusion.
SLICED = """
%fused_dynamic_slice (param_0.1: bf16[1024,2,2,8,64,128]) -> (bf16[1024,1,1,8,64,128], bf16[1024,1,1,8,64,128]) {
  %param_0.1 = bf16[1024,2,2,8,64,128]{5,4,3,2,1,0} parameter(0)
  %dynamic_slice.2.1 = bf16[1024,1,1,8,64,128]{5,4,3,2,1,0} dynamic-slice(%param_0.1, %constant_13_2)
  %dynamic_slice.3.1 = bf16[1024,1,1,8,64,128]{5,4,3,2,1,0} dynamic-slice(%param_0.1, %constant_13_2)
  ROOT %tuple = (bf16[1024,1,1,8,64,128]{5,4,3,2,1,0}) tuple(%dynamic_slice.2.1, %dynamic_slice.3.1)
}

ENTRY %main.1 (p.1: bf16[1024,2,2,8,64,128]) -> bf16[8,1024,1024] {
  %loop_fusion = (bf16[1024,1,1,8,64,128]{5,4,3,2,1,0}) fusion(%p.1, %i.1), kind=kLoop, calls=%fused_dynamic_slice
}
"""
# Sums and gathers, started and not, one of two arrays; ends of what has started are not counted again.
EXCHANGED = """
  %all-reduce-start = bf16[544,4096]{1,0} all-reduce-start(%fusion.1), channel_id=1, replica_groups={{0,1}}
  %all-reduce-done = bf16[544,4096]{1,0} all-reduce-done(%all-reduce-start)
  %all-reduce-start.1 = ((bf16[544,4096]{1,0}), bf16[544,4096]{1,0}) all-reduce-start(%fusion.1), channel_id=1
  %all-reduce-start.2 = ((f32[64]{0}, pred[4]{0}), (f32[64]{0}, pred[4]{0})) all-reduce-start(%a, %b), channel_id=7
  %all-reduce.5 = bf16[544,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%all-gather-fusion), channel_id=4
  %all-reduce.6 = (f32[64]{0}, pred[4]{0}) all-reduce(%a, %b), channel_id=5
  %all-gather-start = (f32[64]{0}, f32[8,64]{1,0}) all-gather-start(%c), channel_id=2
  %all-gather.1 = f8e4m3fn[64,8]{1,0} all-gather(%d), channel_id=3
  %collective-permute-start = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%e), channel_id=6
"""
# A layer is cut out and looked up at once: what is cut out is never written.
LOOKED_UP = SLICED.replace("tuple(%dynamic_slice.2.1, %dynamic_slice.3.1)", "gather(%dynamic_slice.2.1, %i)").replace(
    "ROOT %tuple = (bf16[1024,1,1,8,64,128]{5,4,3,2,1,0})", "ROOT %gather = bf16[32,8,64,128]{3,2,1,0}"
)


def kernel(spill_bytes: int = 0, shared_bytes: int = 0, split_atoms: tuple[str, ...] = ()) -> report.Kernel:
    return report.Kernel(
        "decode",
        registers=168,
        spill_bytes=spill_bytes,
        stack_bytes=0,
        shared_bytes=shared_bytes,
        grid=(1,),
        threads=128,
        split_atoms=split_atoms,
        **report.count_instructions(""),
    )


def memory(**changed) -> Memory:
    numbers = {"pool_bytes": 4000, "part_bytes": 1000, "donated_bytes": 4000, "alias_bytes": 4000, "temp_bytes": 0}
    return Memory(**(numbers | changed))


def test_ptxas_says_registers_spills_stack_and_shared_memory_of_each_kernel():
    assert report.read_ptxas(SPILLING) == {
        "decode": {"registers": 72, "spill_bytes": 24, "stack_bytes": 16, "shared_bytes": 0, "serialised": False},
        "merge": {"registers": 68, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 1, "serialised": False},
    }
    found = report.read_ptxas(SERIALISED + SPILLING)
    assert [numbers["serialised"] for numbers in found.values()] == [False, True]
    assert report.judge_kernel(dataclasses.replace(kernel(), serialised=True), 0) == [
        "ptxas serialises its wgmmas: other instructions touch their registers while they run"
    ]


def test_launches_are_read_from_thunks_of_xla_and_passes_of_mosaic():
    assert report.read_thunks(THUNKS) == {"decode": {"grid": (768, 1, 1), "threads": 64, "shared_bytes": 7168}}
    launch = report.read_mosaic_launch(PASSES.splitlines())
    assert launch == {"grid": (264, 1, 1), "threads": 256, "shared_bytes": 32776}
    assert report.read_mosaic_launch(PASSES.splitlines()[:2]) is None


def test_thunks_in_command_buffers_are_counted():
    assert report.count_thunks(THUNKS) == ({}, {"kCustomKernel": 1, "kCustomCall": 1})
    inside = {"kCustomKernel": 1, "kCustomCall": 1, "kMemzero": 1}
    assert report.count_thunks(CAPTURED) == (inside, {"kCopy": 1, "kWhile": 1, "kSort": 1})


def test_instructions_are_counted_by_kind():
    counts = report.count_instructions(PTX)
    assert counts == {"wgmma": 1, "tma_loads": 2, "tma_stores": 1, "mma_sync": 1, "cp_async": 1}


def test_copies_of_a_pool_or_of_a_layer_are_found_where_they_are_written():
    assert report.find_copies(COPIED, [POOL]) == ["copy.14"]
    assert report.find_copies(COPIED, [(512, *POOL[1:])]) == []
    assert report.find_copies(SLICED, [POOL]) == ["dynamic_slice.2.1", "dynamic_slice.3.1"]
    assert report.find_copies(LOOKED_UP, [POOL]) == []


def test_collectives_are_counted_with_the_bytes_that_a_device_gets():
    found = find_collectives(EXCHANGED)
    assert found == {
        ("all-reduce", 544 * 4096 * 2): 3,
        ("all-reduce", 256 + 4): 2,
        ("all-gather", 8 * 64 * 4): 1,
        ("all-gather", 64 * 8): 1,
        ("collective-permute", 16): 1,
    }
    assert report.judge_collectives(found, found) == []
    two = Counter({Collective("all-reduce", 8): 2})
    assert report.judge_collectives(Counter(), two) == ["collectives: none; expected 2 all-reduce of 8 bytes"]


def test_a_kernel_fails_by_spills_and_by_more_shared_memory_than_the_chip_has():
    limit = aot.target("h200").shared_bytes
    assert report.judge_kernel(kernel(shared_bytes=limit), limit) == []
    assert report.judge_kernel(kernel(shared_bytes=limit + 1), limit) == [
        "232,449 bytes of shared memory, the chip has 232,448"
    ]
    assert report.judge_kernel(kernel(spill_bytes=24), limit) == ["spills 24 bytes"]


def test_a_kernel_fails_by_swizzled_tiles_of_few_rows_that_are_more_than_one_wide():
    found = report.find_split_atoms(SPLIT.splitlines())
    assert found == ["bf16[64, 128] in tiles [4, 64]"]
    assert report.judge_kernel(kernel(split_atoms=tuple(found)), 0) == [
        "columns would be swapped: shared memory swizzled by fewer than 8 rows, bf16[64, 128] in tiles [4, 64]"
    ]


def test_a_program_fails_by_copies_of_its_pool_by_a_pool_beside_it_and_by_temporaries_like_a_layer():
    assert report.judge_program(memory(temp_bytes=999), []) == []
    assert report.judge_program(memory(), ["copy.14"]) == ["the pool is copied by copy.14"]
    assert report.judge_program(memory(alias_bytes=3999), []) == ["4,000 bytes are donated and 3,999 aliased"]
    assert report.judge_program(memory(temp_bytes=1000), []) == [
        "1,000 bytes of temporaries, one layer's keys are 1,000"
    ]


def test_targets_are_told_apart_by_what_their_chips_have():
    assert aot.targets() == ["a100", "h100", "h200"]
    h200, a100 = aot.target("h200"), aot.target("a100")
    assert (h200.arch, h200.num_cores, h200.shared_bytes, h200.hopper) == ("sm_90a", 132, 232_448, True)
    assert (a100.arch, a100.num_cores, a100.shared_bytes, a100.hopper) == ("sm_80", 108, 166_912, False)
    with pytest.raises(ValueError, match="unknown target 'b200'; there are a100, h100, h200"):
        aot.target("b200")


# Sources of cases for other processes, which import this file.
HERE = "tests.kernel_report.test_aot"


def broken_programs(target):
    def refuse(target):
        raise NotImplementedError("a head dim of 1\nand more")

    return [
        Case("refuses", {"h": 1}, refuse),
        Case("crashes", {}, lambda target: os.kill(os.getpid(), signal.SIGSEGV)),
        Case("hangs", {}, lambda target: time.sleep(600)),
    ]


def test_a_compiler_that_refuses_crashes_or_hangs_costs_its_own_case_only():
    said = []
    found = check.check("h200", only="refuses|crashes", sources=[f"{HERE}:broken_programs"], show=said.append)
    assert [(row["name"], row["config"], row["reason"]) for row in found["kernels"]] == [
        ("refuses", {"h": 1}, "NotImplementedError: a head dim of 1"),
        ("crashes", {}, "the compiler ended with SIGSEGV; its last words: nothing"),
    ]
    assert found["failed"] == 2 and said[-1].startswith("2 reports, 2 failed")
    began = time.monotonic()
    found = check.check("h200", only="hangs", sources=[f"{HERE}:broken_programs"], timeout_s=3, show=said.append)
    assert [row["reason"] for row in found["kernels"]] == ["not compiled after 3 s"]
    assert time.monotonic() - began < 60


def test_without_the_plugin_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert main(["--target", "h200"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "compiling for a GPU needs jax-cuda13-plugin; install the extra: pip install 'ksana-jax[aot-gpu]'\n"
    )
    assert said.out == ""


def test_a_regular_expression_without_a_case_is_an_error():
    with pytest.raises(ValueError, match="no case for h200 has 'nothing' in its name"):
        check.check("h200", only="nothing", sources=[f"{HERE}:broken_programs"])
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        check.check("h200", only="(", sources=[f"{HERE}:broken_programs"])


def programs(target):
    """Two kernels that double a matrix, and three ways to add to a row of a pool."""
    import jax
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.experimental.pallas.triton as plt
    import jax.numpy as jnp

    matrix = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    pool, row = jax.ShapeDtypeStruct(POOL, jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)

    def triton_double(x):
        def double(x_ref, out_ref):
            out_ref[...] = x_ref[...] * 2

        options = plt.CompilerParams(num_warps=4, num_stages=2)
        return pl.pallas_call(double, out_shape=matrix, compiler_params=options, name="double")(x)

    def mosaic_double(x):
        def double(x_g, out_g, x_s, barrier):
            plgpu.copy_gmem_to_smem(x_g, x_s, barrier)
            plgpu.barrier_wait(barrier)
            x_s[...] = x_s[...] * 2
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_s, out_g)
            plgpu.wait_smem_to_gmem(0)

        scratch = (plgpu.SMEM((128, 64), jnp.float32), plgpu.Barrier(num_arrivals=1))
        options = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
        return plgpu.kernel(
            double, out_type=matrix, scratch_types=scratch, grid=(3,), grid_names=("i",), compiler_params=options
        )(x)

    def split_atoms(x):
        """As the merge of partial results once stored them: 64 columns at a time, of which 4 rows are copied."""

        def copy(x_g, out_g, x_s, result_s, barrier):
            plgpu.copy_gmem_to_smem(x_g, x_s, barrier)
            plgpu.barrier_wait(barrier)
            for i in range(2):
                half = plgpu.layout_cast(x_s[:, i * 64 : (i + 1) * 64], plgpu.Layout.WGMMA)
                result_s[:, i * 64 : (i + 1) * 64] = half.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result_s.at[pl.ds(0, 4)], out_g)
            plgpu.wait_smem_to_gmem(0)

        tiles = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        scratch = (plgpu.SMEM((64, 128), jnp.float32, transforms=tiles), plgpu.SMEM((64, 128), jnp.bfloat16))
        options = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
        return plgpu.kernel(
            copy,
            out_type=jax.ShapeDtypeStruct((4, 128), jnp.bfloat16),
            scratch_types=(*scratch, plgpu.Barrier()),
            grid=(1,),
            grid_names=("i",),
            compiler_params=options,
        )(x)

    def add(pool, row):
        return pool.at[row].add(1)

    def case(name, function, *arrays, **options):
        return Case(name, {}, functools.partial(_lower, function=function, arrays=arrays, options=options))

    found = [
        case("triton", triton_double, matrix),
        case("donated", add, pool, row, donate_argnums=0),
        case("kept", add, pool, row),
        case("donated in vain", lambda pool, row: pool[row], pool, row, donate_argnums=0),
    ]
    if target.hopper:
        wide = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        found += [case("mosaic", mosaic_double, matrix), case("split atoms", split_atoms, wide)]
    return found


def _lower(target, *, function, arrays, options):
    return aot.lower(target, function, *arrays, **options)


@needs_plugin
@pytest.mark.parametrize("name", ["h200", "a100"])
def test_kernels_and_donated_pools_are_compiled_for_a_chip_that_is_not_there(name):
    found = check.check(name, sources=[f"{HERE}:programs"], show=lambda line: None)
    rows = {row["name"]: row for row in found["kernels"]}
    assert rows["triton"]["kernel"] == "double"
    assert 0 < rows["triton"]["registers"] < 256
    assert (rows["triton"]["grid"], rows["triton"]["threads"]) == ([1, 1, 1], 128)
    assert rows["triton"]["reason"] is None and rows["donated"]["reason"] is None
    assert rows["donated"]["alias_bytes"] == rows["donated"]["pool_bytes"] == 536_870_912
    assert rows["kept"]["reason"].startswith("the pool is copied by copy")
    assert "536,870,912 bytes are donated and 0 aliased" in rows["donated in vain"]["reason"]
    assert found["failed"] == 2 + (name == "h200")
    if name == "h200":
        assert "bf16[64, 128] in tiles [4, 64]" in rows["split atoms"]["reason"]
        mosaic = rows["mosaic"]
        assert mosaic["kernel"] == "double" and mosaic["reason"] is None
        assert (mosaic["grid"], mosaic["threads"], mosaic["tma_loads"], mosaic["tma_stores"]) == ([3, 1, 1], 128, 1, 1)
        assert 128 * 64 * 4 < mosaic["shared_bytes"] < 128 * 64 * 4 + 64  # and a barrier
    json.dumps(found)
