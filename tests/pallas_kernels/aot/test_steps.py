"""The model of speed of whole programs: launches and their bytes are read from the program, terms are added up."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels import work
from pallas_kernels.aot import report
from pallas_kernels.patterns import Pattern
from pallas_kernels.speed import baseline, lists, models, steps
from pallas_kernels.speed.chip import H200
from pallas_kernels.speed.launches import read_launches
from pallas_kernels.speed.parts import find_parts, working
from pallas_kernels.speed.predict import Machine
from pallas_kernels.speed.products import Ahead, Product
from tests.pallas_kernels.aot.test_speed import LOOP, function

HLO = """HloModule jit_step

%fused_gather (param_0: bf16[1000,64], param_1: s32[8]) -> bf16[8,64] {
  %param_0 = bf16[1000,64]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  %bitcast.1 = s32[8,1]{1,0} bitcast(%param_1)
  ROOT %gather.1 = bf16[8,64]{1,0} gather(%param_0, %bitcast.1), offset_dims={1}
}

%dot_computation (parameter_0: bf16[8,2,32], parameter_1: bf16[96,2,32]) -> f32[2,8,96] {
  %parameter_0 = bf16[8,2,32]{2,1,0} parameter(0)
  %parameter_1 = bf16[96,2,32]{2,1,0} parameter(1)
  ROOT %dot.1 = f32[2,8,96]{2,1,0} dot(%parameter_0, %parameter_1), lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={1}, rhs_contracting_dims={2}
}

ENTRY %main (embed: bf16[1000,64], tokens: s32[8], w: bf16[96,64]) -> f32[2,8,96] {
  %embed = bf16[1000,64]{1,0} parameter(0)
  %tokens = s32[8]{0} parameter(1)
  %w = bf16[96,64]{1,0} parameter(2)
  %loop_gather_fusion = bf16[8,64]{1,0} fusion(%embed, %tokens), kind=kLoop, calls=%fused_gather, metadata={op_name="jit(step)/embed/gather"}
  %bitcast.2 = bf16[8,2,32]{2,1,0} bitcast(%loop_gather_fusion)
  %bitcast.3 = bf16[96,2,32]{2,1,0} bitcast(%w)
  ROOT %gemm_fusion_dot.7 = f32[2,8,96]{2,1,0} fusion(%bitcast.2, %bitcast.3), kind=kCustom, calls=%dot_computation
}
"""  # noqa: E501
THUNKS = """000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=002 (1)] loop_gather_fusion grid: [4, 2, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
    002: kCustomKernel [prev=001 (1) | sink        ] gemm_fusion_dot grid: [12, 1, 1] threads: [64, 1, 1]  shared_memory: 512 bytes
"""  # noqa: E501


SLICED = """HloModule jit_step

%dynamic-slice-fusion (p0: s32[64], p1: bf16[8,64]) -> bf16[8,64] {
  %p0 = s32[64]{0} parameter(0)
  %p1 = bf16[8,64]{1,0} parameter(1)
  %slice.1 = s32[8]{0} slice(%p0), slice={[8:16]}
  ROOT %mpmd_map.1 = bf16[8,64]{1,0} custom-call(%p1, %slice.1), metadata={op_name="jit(step)/layer0/kv_write/kv_write/mpmd_map"}, backend_config={kernel_hash = "abc"}
}

ENTRY %main (packed: s32[64], q: bf16[8,64]) -> bf16[8,64] {
  %packed = s32[64]{0} parameter(0)
  %q = bf16[8,64]{1,0} parameter(1)
  ROOT %dynamic_slice_fusion = bf16[8,64]{1,0} fusion(%packed, %q), kind=kCustom, calls=%dynamic-slice-fusion
}
"""  # noqa: E501
SLICED_THUNKS = """000: kCommandBuffer [source | sink]
    001: kDynamicSliceFusion [source | sink] params=2, results=1
        002: kCustomCall [source | sink] kCustomCall
"""


def test_a_call_that_reads_a_slice_is_one_launch():
    [launch] = read_launches(SLICED, SLICED_THUNKS)
    assert (launch.pallas, launch.scope) == ("abc", "layer0/kv_write/kv_write/mpmd_map")
    inside, outside = report.count_thunks(SLICED_THUNKS)
    assert (inside, outside) == ({"kCustomCall": 1}, {})


def test_launches_have_their_bytes_and_operations():
    gather, product = read_launches(HLO, THUNKS)
    assert (gather.scope, gather.kernel, gather.grid, gather.threads) == ("embed/gather", "loop_gather_fusion", 8, 128)
    # Eight rows of the embedding and the tokens are read, not all rows; the rows are written.
    assert (gather.argument_bytes, gather.passed_bytes) == (8 * 64 * 2 + 8 * 4, 8 * 64 * 2)
    assert not gather.product and product.product
    # The weights are an argument through a bitcast. Operations are those of 64 rows.
    assert product.argument_bytes == 96 * 64 * 2 and product.passed_bytes == 8 * 64 * 2 + 2 * 8 * 96 * 4
    assert product.flops == 2 * 64 * 64 * 96


def test_thunks_of_another_program_are_refused():
    with pytest.raises(ValueError, match="2 instructions are started by 1 thunks"):
        read_launches(HLO, "\n".join(THUNKS.splitlines()[:2]))
    with pytest.raises(ValueError, match="loop_gather_fusion is started by the thunk of loop_add_fusion"):
        read_launches(HLO, THUNKS.replace("loop_gather_fusion", "loop_add_fusion"))


def test_a_product_takes_its_weights_or_its_operations():
    _, product = read_launches(HLO, THUNKS)
    gigabyte = dataclasses.replace(product, argument_bytes=10**9)
    start = H200.us(H200.dram_latency)
    assert steps.product_us(gigabyte, H200) == pytest.approx(1e9 / 3.96e12 * 1e6 + start)
    many = dataclasses.replace(gigabyte, flops=10**12)
    assert steps.product_us(many, H200) == pytest.approx(1e12 / 708e12 * 1e6 + start)


def test_a_small_kernel_takes_its_instructions_its_turns_and_its_waves():
    lines = ("@P0 EXIT", "LDG.E R4, [R2.64]; 1, 0, 7, 0", "STG.E [R2.64], R4; 1, 7, 7, 1", "EXIT")
    once = Machine(find_parts(function(*lines), working), resident=8, warpgroups=1)
    assert [i.name for i in once.parts.before] == ["EXIT", "LDG", "STG", "EXIT"]
    gather, _ = read_launches(HLO, THUNKS)
    alone = steps.own_us(gather, once, H200)
    assert H200.us(H200.l2_latency) < alone < 2 * H200.us(H200.l2_latency)
    waves = dataclasses.replace(gather, grid=3 * 8 * H200.num_cores)
    assert steps.own_us(waves, once, H200) > 2.9 * alone
    # Each thread reads four bytes in a turn: as many turns as what is read needs.
    loop = (
        ".L_x_1:",
        *["LDG.E R4, [R2.64]; 1, 0, 7, 0", "FADD R5, R4, R5; 4, 7, 7, 1"] * 9,
        "@P0 BRA `(.L_x_1)",
        "EXIT",
    )
    turns = Machine(find_parts(function(*loop), working), resident=8, warpgroups=1)
    few, many = (dataclasses.replace(gather, passed_bytes=n * 8 * 128 * 36) for n in (2, 20))
    assert 8 < steps.own_us(many, turns, H200) / steps.own_us(few, turns, H200) < 12
    large = dataclasses.replace(gather, passed_bytes=55 * 10**6)
    assert steps.own_us(large, once, H200) == pytest.approx(10, rel=0.01)


SCATTER = """%fused_scatter (param_0: f32[100,64], param_1: s32[8], param_2: f32[8,64]) -> f32[100,64] {
  %param_0 = f32[100,64]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  %param_2 = f32[8,64]{1,0} parameter(2)
  %bitcast.1 = f32[100,64]{1,0} bitcast(%param_0)
  %scatter.1 = f32[100,64]{1,0} scatter(%bitcast.1, %param_1, %param_2), to_apply=%add
  ROOT %bitcast.2 = f32[100,64]{1,0} bitcast(%scatter.1)
}

ENTRY %main (scores: f32[100,64], at: s32[8], new: f32[8,64]) -> f32[100,64] {
  %scores = f32[100,64]{1,0} parameter(0)
  %at = s32[8]{0} parameter(1)
  %new = f32[8,64]{1,0} parameter(2)
  ROOT %input_scatter_fusion = f32[100,64]{1,0} fusion(%scores, %at, %new), kind=kInput, calls=%fused_scatter
}
"""


def test_an_update_in_place_touches_what_it_updates():
    thunk = "000: kCustomKernel [source | sink] input_scatter_fusion grid: [4, 1, 1] threads: [128, 1, 1]\n"
    [update] = read_launches(SCATTER, thunk)
    # The update is read, and the same number of bytes of the array is read and written.
    assert update.argument_bytes == 2 * 8 * 64 * 4 + 8 * 4 and update.passed_bytes == 8 * 64 * 4


def test_kernels_are_told_apart_by_their_scopes():
    [launch, _] = read_launches(HLO, THUNKS)
    for scope, name in (
        ("layer3/attention/jit(attend)/hopper_attention/mpmd_map", steps.ATTENTION),
        ("layer3/attention/shared/jit(attend)/hopper_attention/mpmd_map", steps.SHARED_ATTENTION),
        ("layer3/attention/shared/jit(attend)/hopper_merge/mpmd_map", steps.SHARED_MERGE),
        ("layer0/kv_write/kv_write/mpmd_map", steps.WRITE),
        ("layer0/qkv/jit(multiply)/hopper_product/mpmd_map", "product qkv"),
        ("layer0/mlp/down/jit(multiply)/hopper_product/mpmd_map", "product down"),
    ):
        assert steps._kind(dataclasses.replace(launch, scope=scope)) == name
    with pytest.raises(ValueError, match="no model of the kernel of embed/gather"):
        steps._kind(launch)


def test_a_window_at_long_text_has_the_pieces_of_its_model():
    length, size = 131_072, 64
    starts = size * np.arange(length // size, dtype=np.int32)[None]
    sizes = {"block_size": size, "num_kv_heads": 1, "per_block_id": 1, "num_workers": 264}
    schedule = jax.jit(functools.partial(work.schedule, pattern=Pattern(window=4096, num_sinks=4), **sizes))
    most = 0
    for position in range(length - 66, length, 5):
        made = schedule(np.zeros_like(starts), starts, np.full((1, 1), position, np.int32))
        used = int(np.asarray(made.first)[-1])
        most = max(most, int(np.asarray(made.segments)[:used, work.NUM_PIECES].sum()))
    assert most * lists.TILE_KV == models.WINDOWED


def case(**changed) -> dict:
    terms = {"products": 3000.0, "gaps": 600.0}
    said = {"shape": "1 row", "us": 3600.0, "terms": terms, "share": 0.8, "tflops": 0.0, "limit": "products"}
    return {
        "name": "step", "config": {"rows": 1}, "predictions": [said], "launches": 500, "launches_per_layer": 14,
        "host_us": 30.0, "aim_ms": 4.4, "reason": None,
    } | changed  # fmt: skip


def test_a_whole_step_hides_the_host():
    [step] = steps.whole_steps([case(), {"name": "a kernel"}])
    assert step["terms"] == {"products": 3000, "gaps": 600}
    assert (step["launches"], step["launches_per_layer"], step["ms"], step["aim_ms"]) == (500, 14, 3.6, 4.4)
    assert steps.whole_steps([case(host_us=9000.0)])[0]["ms"] == 9
    longer = case()
    longer["predictions"] *= 2
    assert [step["aim_ms"] for step in steps.whole_steps([longer])] == [4.4, None]
    table = baseline.table_of_steps([step])
    assert "| 1 row | 3,000 | 600 | **3.60**, aim 4.4 | 500, 14 |" in table


def test_the_choice_of_tokens_is_no_part_of_layers():
    gather, product = read_launches(HLO, THUNKS)
    merge = dataclasses.replace(gather, name="custom-call", pallas="abc", scope="layer0/attention/hopper_merge/x")
    of_choice = [dataclasses.replace(x, scope=f"choice/{x.name}") for x in (product, gather)]
    code = steps.Code([gather, *[merge] * 12, *of_choice], {})
    assert code.terms == [steps.ONCE, *[steps.MERGE] * 12, steps.LM_HEAD, steps.CHOICE]
    assert code.launches_per_layer == 1


def test_a_step_with_more_launches_or_a_longer_one_fails():
    base = {"versions": baseline.versions(), "cases": baseline.entries([case()])}
    assert baseline.judge([case()], base) == {}
    assert baseline.judge([case(launches_per_layer=15)], base) == {
        "step rows=1": ["computed launches per layer: 15, stored 14"]
    }
    slower = case()
    slower["predictions"] = [slower["predictions"][0] | {"us": 3800.0}]
    assert baseline.judge([slower], base) == {"step rows=1": ["computed us of 1 row: 3,800, stored 3,600"]}


def test_models_are_of_decode_steps():
    assert models.step(64, 8) is models.step(3, 0) is None
    assert models.step(64, 0).mass is models.step(64, 0).shared is None
    # Groups of 8 rows are tiles of 32 rows of queries: 32 x 128 numbers, which 8 blocks of threads hold 128 of each.
    shared = models.step(64, 0, group=8)
    assert shared.shared.merge.loops * shared.shared.merge.shares * 128 == 8 * 4 * 128
    [rows] = shared.shapes.values()
    assert len(rows.lengths) == 64 and len(rows.shared) == 8
    assert models.step(64, 0, mass=True).mass.kernel == steps.MASS


def test_shared_blocks_are_read_once_for_a_group():
    shared, whole = models.step(64, 0, group=8), models.step(64, 0)
    [rows] = shared.shapes.values()
    read = shared.attention.num_bytes(rows.lengths) + shared.shared.num_bytes(rows.shared)
    separate = whole.attention.num_bytes(whole.shapes["64 rows of 6k"].lengths)
    assert read / separate == pytest.approx((2 + 4 / 8) / 6, rel=0.01)


def test_a_product_takes_its_weights_and_the_rows_that_its_blocks_read_again():
    machine = Machine(find_parts(function(*LOOP)), resident=1, warpgroups=1)
    few, many = Product(8, 14_336, 4096), Product(64, 14_336, 4096)
    weights_us = 2 * 14_336 * 4096 / 3.96e12 * 1e6
    found = few.of_machine(machine, H200)
    assert found.terms["memory"] == pytest.approx(weights_us) and found.limit == "memory"
    assert found.us == pytest.approx(sum(found.terms.values()) - found.terms["compute"])
    # 64 blocks of threads read 64 rows each: as many bytes as the weights.
    found = many.of_machine(machine, H200)
    assert found.terms["memory"] == pytest.approx(2 * 2 * 14_336 * 4096 / 5.5e12 * 1e6) and found.limit == "L2"
    # Half of the weights from the L2 cost what the L2 takes for all.
    found = few.of_machine(machine, H200, few.weight_bytes / 2)
    assert found.terms["memory"] == pytest.approx(few.weight_bytes * 1.125 / 5.5e12 * 1e6)


def test_weights_asked_for_ahead_come_while_memory_has_nothing_to_do():
    per_us = 3.96e6

    def found(asked, launches, start_us=0.5, end_us=0.3):
        ahead = Ahead(H200)
        ahead.ask(asked, end_us)
        for us, num_bytes in launches:
            ahead.start()
            ahead.run(us, num_bytes)
        ahead.start()
        return ahead.take(start_us), ahead.take(start_us)

    # Between two products: the end of one, a gap, the start of the other; and only once.
    assert found(12e6, []) == (pytest.approx((0.3 + H200.launch_us + 0.5) * per_us), 0)
    assert found(1e6, []) == (1e6, 0)
    # What runs meanwhile leaves the time in which it reads nothing.
    idle_us = 0.3 + 2 * H200.launch_us + 2 + 0.5
    assert found(50e6, [(4, 2 * per_us)])[0] == 0  # more than the L2 keeps
    assert found(16e6, [(4, 2 * per_us)])[0] == pytest.approx(min(16e6, idle_us * per_us))
    assert found(12e6, [(10, 20e6)])[0] == 0  # what was read meanwhile has taken its place
