"""The model of speed: machine code is read rightly, loops are found, instructions, pipes and bytes take their time."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest

from experiments.gpu.cases import decode_cases
from pallas_kernels import aot, work
from pallas_kernels.aot import check
from pallas_kernels.patterns import FULL
from pallas_kernels.speed import baseline, flow, grids, lists, meetings, parts, pipes, predict, sass, warp
from pallas_kernels.speed.chip import H200

needs_compiler = pytest.mark.skipif(
    aot.missing() is not None or sass.find_nvdisasm() is None, reason=aot.missing() or "nvdisasm is not installed"
)


def listing(*lines: str) -> str:
    """A kernel as nvdisasm prints it. Each line is `opcode operands; stall, writes, reads, waits` or a label."""
    text, address = [".text.kernel:"], 0
    for line in lines:
        if line.startswith(".L"):
            text.append(line)
            continue
        code, _, numbers = line.partition(";")
        stall, writes, reads, waits = (int(n) for n in numbers.split(",")) if numbers else (1, 7, 7, 0)
        upper = stall << 41 | writes << 46 | reads << 49 | waits << 52
        text.append(f"        /*{address:04x}*/    {code.strip()} ;    /* 0x0000000000000000 */")
        text.append(f"                             /* 0x{upper:016x} */")
        address += 16
    return "\n".join(text)


def function(*lines: str) -> sass.Function:
    return sass.parse(listing(*lines))["kernel"]


# As in nvdisasm's output of a kernel: a branch that waits for scoreboards 3 and 5 and stalls 11 cycles, a load.
REAL = """
.text.hopper_attention:
        /*1f90*/              @!P1 BRA `(.L_x_6) ;                                        /* 0x0000000400fc9947 */
                                                                                          /* 0x028fd60003800000 */
        /*1eb0*/                   LDG.E R58, desc[UR4][R58.64] ;                         /* 0x000000043a3a7981 */
                                                                                          /* 0x000ea2000c1e1900 */
.L_x_6:
        /*8750*/                   EXIT ;                                                 /* 0x000000000000794d */
                                                                                          /* 0x000fea0003800000 */
"""
# Keys are asked for before the loop and in it; a mask is skipped by most turns.
LOOP = (
    "UTMALDG.4D [UR8], [UR14]",
    "UTMALDG.4D [UR8], [UR14]",
    ".L_x_1:",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "@P1 BRA `(.L_x_2)",
    "FSEL R1, R1, -INF , !P2",
    "FSEL R2, R2, -INF , !P2",
    "FSEL R3, R3, -INF , !P2",
    ".L_x_2:",
    "@P2 BRA `(.L_x_3)",
    "UTMALDG.4D [UR8], [UR14]",
    ".L_x_3:",
    "MUFU.EX2 R4, R1",
    "@P0 BRA `(.L_x_1)",
    "STG.E [R2.64], R4",
    "EXIT",
)


def test_instructions_are_read_with_their_stalls_and_scoreboards():
    [branch, load, end] = sass.parse(REAL)["hopper_attention"].code
    assert (branch.predicate, branch.target, branch.stall, branch.waits) == ("@!P1", "L_x_6", 11, 0b101000)
    assert (load.opcode, load.name, load.writes, load.reads, load.stall) == ("LDG.E", "LDG", 2, None, 1)
    assert sass.parse(REAL)["hopper_attention"].labels == {"L_x_6": 2} and end.ends
    with pytest.raises(ValueError, match="half of an encoding is missing after '/\\*8750"):
        sass.parse(REAL[: REAL.rindex("/* 0x000fea")])


def test_a_turn_asks_for_copies_and_skips_masks():
    found = parts.find_parts(function(*LOOP))
    assert [i.name for i in found.turn] == ["HGMMA", "WARPGROUP", "BRA", "BRA", "UTMALDG", "MUFU", "BRA"]
    assert [i.name for i in found.before] == ["UTMALDG", "UTMALDG"] and found.stages == 2
    assert [i.name for i in found.after] == ["STG", "EXIT"] and found.around == found.masked == ()
    counts = parts.count(found.turn)
    assert (counts["instructions"], counts["copies"], counts["mufu"], counts["alu"]) == (7, 1, 1, 0)
    assert counts["wgmma"] == {"hgmma 64x64x16": 1} and counts["shared_bytes"] == 4096


def test_loops_are_nested_and_the_inner_one_is_that_with_products():
    code = function(
        ".L_x_0:", "LDG.E R1, [R2.64]", ".L_x_1:", "HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA `(.L_x_1)",
        "STG.E [R2.64], R4", "@P1 BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip
    inner, outer = flow.loops(flow.blocks(code))
    assert inner.blocks < outer.blocks
    found = parts.find_parts(code)
    assert [i.name for i in found.turn] == ["HMMA", "BRA"]
    assert [i.name for i in found.around] == ["LDG", "HMMA", "BRA", "STG", "BRA"]


def cycles(*lines: str, **settings) -> float:
    return warp.simulate(function(*lines).code, H200, **settings).cycles


def test_a_warp_takes_its_stalls_and_waits_for_scoreboards():
    assert cycles(*["IADD3 R1, R1, R2, RZ; 4, 7, 7, 0"] * 10) == 40
    used = pipes.use(function("LDS R1, [R2]").code[0], H200, 0)
    waits = ("LDS R1, [R2]; 1, 0, 7, 0", "IADD3 R1, R1, R2, RZ; 4, 7, 7, 1")
    assert cycles(*waits) == used.cycles + used.latency + 4 == 37
    # The load's data comes from further away.
    load = ("LDG.E R1, [R2.64]; 1, 0, 7, 0", "IADD3 R1, R1, R2, RZ; 4, 7, 7, 1")
    assert cycles(*load, load_latency=500) - cycles(*load) == 500 - H200.l1_latency


def test_warps_share_pipes_and_fill_each_others_stalls():
    chain = ["FADD R1, R1, R2; 4, 7, 7, 0"] * 10
    assert cycles(*chain) == cycles(*chain, blocks=4) == 40
    assert cycles(*chain, blocks=8) == pytest.approx(80, rel=0.1)  # one instruction per cycle
    exponentials = ["MUFU.EX2 R1, R1; 1, 7, 7, 0"] * 10
    assert cycles(*exponentials) == cycles(*exponentials, blocks=1) == 80
    assert cycles(*exponentials, blocks=2) == 160


def test_products_of_matrices_take_their_flops_or_the_reading_of_their_operands():
    wide = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0"
    registers = "HGMMA.64x8x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88, gsb0"
    assert cycles(*[wide] * 10) == 640
    assert cycles(*["HGMMA.64x8x16.F32.BF16 R24, gdesc[UR16], R24, gsb0"] * 10) == 180  # 2,304 bytes
    assert cycles(*[registers] * 10) == 40
    waited = (wide, "WARPGROUP.DEPBAR.LE gsb0, 0x0; 1, 7, 7, 0")
    assert cycles(*waited) > 64 + pipes.WGMMA_LATENCY


def test_barriers_of_several_warpgroups_keep_their_warps_together():
    code = function("BAR.SYNC.DEFER_BLOCKING 0x1, 0x100; 1, 7, 7, 0", *["FADD R1, R1, R2; 4, 7, 7, 0"] * 10).code
    alone, together = (warp.simulate(code, H200, warps=n).cycles for n in (1, 2))
    assert alone == pytest.approx(together, rel=0.1)


# Two warpgroups meet twice in a turn, so that one multiplies while the other computes exponentials.
TURNS = (
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, gsb0; 1, 7, 7, 0",
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ; 1, 7, 7, 0",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R8; 1, 1, 7, 0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0; 1, 7, 7, 2",
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR21], RZ; 1, 7, 7, 0",
    "MUFU.EX2 R1, R1; 15, 7, 7, 0",
    *["FADD R1, R1, R2; 15, 7, 7, 0"] * 20,
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ; 1, 7, 7, 0",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R8; 1, 1, 7, 0",
    "HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88, gsb0; 1, 7, 7, 2",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0; 1, 7, 7, 0",
)


def test_warpgroups_that_take_turns_meet_where_both_arrive_and_wait():
    code = function(*TURNS).code
    found = meetings.find_meetings(code)
    assert sorted(found) == [1, 2, 26, 27] and len(set(found.values())) == 1  # UR21 is of a place to copy to
    met = meetings.Meetings(code, warps=2)
    assert met.open(0, 2, begins=False) == float("inf")
    met.issue(0, 1, code[1], 100.0)
    assert met.open(1, -1, begins=True) == 100  # the second one begins when the first has issued its products
    assert met.open(0, 2, begins=False) == 100
    # One alone never waits for others; two take at least as long, each as long as the products of both.
    alone, both = (warp.simulate(code, H200, warps=n).cycles for n in (1, 2))
    assert 300 < alone <= both < 2 * alone


def test_blocks_of_threads_fit_by_registers_and_shared_memory():
    assert H200.resident(201, 128, 106_593) == 2
    assert H200.resident(255, 128, 0) == 2 and H200.resident(64, 128, 0) == 8
    assert H200.resident(32, 1024, 0) == 2 and H200.resident(16, 64, 0) == 32


@pytest.mark.parametrize(
    "lengths, workers", [((4096,), 264), ((512,) * 9, 7), ((70, 1, 900, 10_000), 264), ((64,) * 40, 7)]
)
def test_stretches_are_those_of_the_work_list(lengths, workers):
    size = 64
    starts = np.full((len(lengths), -(-max(lengths) // size)), work.FAR, np.int32)
    for row, length in enumerate(lengths):
        starts[row, : -(-length // size)] = size * np.arange(-(-length // size))
    positions = np.asarray([[length - 1] for length in lengths], np.int32)
    sizes = {"block_size": size, "num_kv_heads": 3, "per_block_id": 1, "num_workers": workers}
    schedule = jax.jit(functools.partial(work.schedule, pattern=FULL, **sizes))
    made = schedule(np.zeros_like(starts), starts, positions)
    found = lists.stretches(lengths, 3, workers)
    first, segments = np.asarray(made.first), np.asarray(made.segments)
    some = np.diff(first) > 0
    assert found.segments == np.diff(first)[some].tolist()
    assert found.of_pair == np.diff(np.asarray(made.of_pair))[: 3 * len(lengths)].tolist()
    pieces = [segments[a:b, work.NUM_PIECES].sum() for a, b in itertools.pairwise(first)]
    assert found.pieces == np.asarray(pieces)[some].tolist()


def test_the_shapes_are_those_of_the_gpu_script():
    assert {case.name: case.lengths for case in decode_cases(64, False)} == lists.DECODE


def machine(**changed) -> predict.Machine:
    return dataclasses.replace(predict.Machine(parts.find_parts(function(*LOOP)), resident=2, warpgroups=1), **changed)


def test_decode_is_limited_by_memory_or_by_what_its_loop_waits_for():
    merge = predict.Merge(segments=8, shares=4, idle_blocks=1056)
    model = predict.Attention(8, 32_768, 264, merge, ("attention", "merge"))
    machines = {"attention": machine(), "merge": machine(resident=16)}
    found = {p.shape: p for p in model.predict(machines, H200)}
    long = found["64x4k"]
    assert long.limit == "memory" and 0.9 < long.share * H200.copy_bytes_per_s / H200.read_bytes_per_s < 1
    rest = long.terms["start and end"] + long.terms["merge"] + 2 * H200.launch_us
    assert long.us == pytest.approx(long.terms["memory"] + rest, rel=1e-3)
    assert found["1x4k"].share < 0.8 * long.share  # too short for its start, its end and its launches
    # More segments of a pair, or all pairs instead of the split ones, are merged for longer.
    assert found["1x32k"].terms["merge"] > long.terms["merge"]
    every = dataclasses.replace(model, merge=predict.Merge(1, 1, 0)).predict(machines, H200)
    assert every[-1].terms["merge"] > found["256x512"].terms["merge"]
    slow = function(*(line for line in LOOP for _ in range(400 if line.startswith("MUFU") else 1)))
    found = model.predict(machines | {"attention": machine(parts=parts.find_parts(slow))}, H200)
    assert found[0].limit == "issue" and found[0].share < long.share


def test_a_prefill_takes_the_turns_of_its_tiles_on_all_multiprocessors():
    products = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0"] * 16
    masked = [".L_x_9:", *products[:12], "@P0 BRA `(.L_x_9)"]
    code = function(*masked, ".L_x_1:", *products, "@P0 BRA `(.L_x_1)", "EXIT")
    made = machine(parts=parts.find_parts(code), resident=1, warpgroups=2)
    assert len(made.parts.masked) == 13 and len(made.parts.turn) == 17
    model = grids.Prefill("kernel", 32, 8, 32, 128, 128, 64, {"8k": (8192, 8192), "512 at 4k": (512, 4096)})
    found, chunk = model.predict({"kernel": made}, H200)
    # Products alone: 8k keys of 8k queries, of which half and the diagonal's blocks are computed.
    ideal = 4 * 32 * 128 * 8192**2 / 2 / (132 * H200.tensor_flops * H200.tensor_clock_hz) * 1e6
    assert 1 < found.us / ideal < 1.15 and found.limit == "tensor"
    assert found.tflops == pytest.approx(H200.product_flops / 1e12 * ideal / found.us, rel=0.01)
    # 16 tiles of 8 heads are one wave on 128 multiprocessors, as long as its last tile, which sees all 4,096 keys.
    assert chunk.us / found.us == pytest.approx(512 * 4096 / (8192 * 4096) * 132 / 128, rel=0.05)


def test_a_warpgroup_that_widens_what_others_multiply_waits_and_is_waited_for():
    product = "HGMMA.64x128x16.F32.BF16 R24, R24, gdesc[UR16], R24, gsb0"
    turn = [*[product] * 8, "WARPGROUP.DEPBAR.LE gsb0, 0x0"] * 2
    loop = [".L_x_1:", *turn, "@P0 BRA `(.L_x_1)", "EXIT"]

    def cycles(num_steps: int) -> float:
        half = [*["LOP3.LUT R2, R2, R3, RZ"] * num_steps, *["STS.128 [R4], R8"] * 8, "FENCE.VIEW.ASYNC.S"]
        code = function("@P2 BRA `(.L_x_2)", *loop, ".L_x_2:", *half, *half, "@P1 BRA `(.L_x_2)", "EXIT")
        made = parts.find_parts(code)
        assert len(made.turn) == 19 and len(made.beside) == 2 * len(half) + 1
        return machine(parts=made, resident=1, warpgroups=2).turn(H200, 1).cycles

    alone = machine(parts=parts.find_parts(function(*loop)), resident=1, warpgroups=2).turn(H200, 1).cycles
    assert not parts.find_parts(function(*loop)).beside
    # Two instructions of two cycles each for each step, or the products of two warpgroups: whatever takes longer.
    assert alone <= cycles(10) < 1.1 * alone
    assert 1 < cycles(1000) / 4000 < 1.3


def test_tokens_that_are_written_take_their_bytes_or_a_launch():
    code = function("LDG.E.128 R4, [R2.64]; 1, 0, 7, 0", "STG.E.128 [R2.64], R4; 1, 7, 7, 1", "EXIT")
    made = machine(parts=parts.find_parts(code), resident=8)
    many, few = grids.Tokens("kernel", 20_000).predict({"kernel": made}, H200)
    assert many.limit == "memory" and 0.9 < many.share < 1
    assert few.limit == "launches" and few.share < 0.3


def row(cycles: int = 2000, us: float = 282.0) -> dict:
    shape = {"shape": "64x4k", "us": us, "share": 0.885, "tflops": 0.0, "limit": "memory", "terms": {}}
    speed = {"turn": {"instructions": 490}, "cycles": cycles, "blocks": 2}
    return {
        "name": "hopper attention", "config": {"b": 16}, "kernel": "hopper_attention", "speed": speed,
        "predictions": [shape],
    }  # fmt: skip


def test_a_change_that_costs_more_than_5_percent_fails(monkeypatch):
    base = {"versions": baseline.versions(), "cases": baseline.entries([row()])}
    assert baseline.judge([row(), row(cycles=2100, us=296)], base) == {}
    found = baseline.judge([row(cycles=2101)], base)
    said = "computed cycles of a turn of hopper_attention: 2,101, stored 2,000"
    assert found == {"hopper attention b=16": [said]}
    assert baseline.judge([row(us=297)], base) == {"hopper attention b=16": ["computed us of 64x4k: 297, stored 282"]}
    assert baseline.judge([row(cycles=9000)], base | {"versions": {"jax": "0"}}) == {}
    monkeypatch.setattr(baseline, "stored", lambda: base)
    assert [r["reason"] for r in check._compared([row(cycles=2101) | {"reason": None}])] == [said]
    new = baseline.entries([row(cycles=1000)])
    [line] = baseline.changes(new, base["cases"])
    assert line.split() == "hopper attention b=16 cycles of a turn of hopper_attention 2,000 -> 1,000 -50.0%".split()


def test_the_readme_has_the_stored_predictions():
    text = baseline.README.read_text()
    assert baseline.with_tables(text, baseline.stored()) == text
    assert baseline.table(baseline.stored()["cases"]) in text
    assert baseline.table_of_steps(baseline.stored()["steps"]) in text


def test_a_measured_shape_says_how_many_times_as_long_it_took(monkeypatch):
    monkeypatch.setattr(baseline, "measured", lambda: {"hopper attention b=16": {"64x4k": 423.0}})
    table = baseline.table(baseline.entries([row()]))
    assert ", × 1.50 |" in table
    assert "×" not in baseline.table(baseline.entries([row() | {"name": "another"}]))


@needs_compiler
def test_the_decode_kernel_does_not_become_slower():
    found = check.check("h200", only="^hopper attention$", show=lambda line: None)
    attention = {row["kernel"]: row for row in found["kernels"]}["hopper_attention"]
    turn = attention["speed"]["turn"]
    # Counted by hand: two products of 8 wgmma each, a copy of keys and one of values; of 64 keys x 8 columns a thread
    # has 4 exponentials, and 2 of how the sums of its columns fade.
    assert turn["wgmma"] == {"hgmma 64x8x16": 16} and turn["copies"] == 2 and turn["mufu"] == 6
    assert attention["limit"] == "memory"
    assert 0.9 < attention["predicted_share"] * H200.copy_bytes_per_s / H200.read_bytes_per_s < 1
    assert found["failed"] == 0  # no number is more than 5 % above the stored ones
    json.dumps(found)
