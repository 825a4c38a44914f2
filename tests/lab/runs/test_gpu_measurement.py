"""Measurements of `python -m experiments.gpu`, their order and judgement, without a GPU."""

import dataclasses
import gzip
import json
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpu import candidates, cases, parts, step_parts, timing
from experiments.gpu import race as race_module
from experiments.gpu.compiling import Compiling, compile_in_parallel
from experiments.gpu.context import Context, read_records
from experiments.gpu.gauges import Gauges
from experiments.gpu.race import Entry, race
from experiments.gpu.sections import correctness, decode, prefill, step, throughput
from experiments.gpu.table import table
from experiments.gpu.where import dump_tile, where_wrong
from pallas_kernels.contract import Kernel, Result, check_options
from pallas_kernels.hopper.schedule import Tuning
from pallas_kernels.patterns import FAR, Pattern
from tests.lab.runs.gpu_context import make_context


def test_rounds_go_to_and_fro_and_drop_who_fails():
    asked = []

    def sampler(name, seconds):
        def sample():
            asked.append(name)
            if name == "b" and asked.count("b") == 2:
                raise RuntimeError("gone")
            return seconds

        return sample

    times, failed = timing.rounds({"a": sampler("a", 1.0), "b": sampler("b", 2.0), "c": sampler("c", 3.0)}, count=3)
    assert asked == ["a", "b", "c", "c", "b", "a", "a", "c"]
    assert times["a"].rounds == (1.0,) * 3 and set(times) == {"a", "c"} and str(failed["b"]) == "gone"


@pytest.mark.soak
def test_the_first_case_is_timed_before_the_last_is_lowered(tmp_path, monkeypatch):
    monkeypatch.setattr(race_module, "FIRST_S", 1.0)
    lowered = []

    def slow(case):
        def attend(call, work, *, tuning):
            time.sleep(0.5)  # what it takes to lower a kernel
            lowered.append(case)
            return candidates.reference()(call)

        return Kernel(attend, None)

    context = make_context(tmp_path)
    tried = []
    for number in range(6):
        case = cases.Case(f"case {number}", (40,), 16, 4, 2, 64, tiny=True)
        tried.append(Entry(case, [candidates.ours_as(n, slow(case.name), case) for n in ("a", "b")]))
    begins, before_first = Context.timing_begins, []
    monkeypatch.setattr(Context, "timing_begins", lambda self: (before_first.append(len(set(lowered))), begins(self)))
    measured = race(context, "decode, blocks of 64", tried)
    # All is timed in the end, also what was not compiled when its case's turn came.
    assert {(case, who) for case, who, _ in measured} == {(f"case {n}", who) for n in range(6) for who in "ab"}
    assert before_first[0] <= 2
    assert len([r for r in read_records(context.records) if r.get("name") == "first timing"]) == 1


@pytest.mark.soak
def test_a_slow_compiler_does_not_hold_up_the_first_timing(tmp_path, monkeypatch):
    monkeypatch.setattr(race_module, "FIRST_S", 0.2)
    compile_it, fast_is_timed = Compiling._compile, threading.Event()

    def slowly(self, name, *arguments):
        if name[1][0] == "slow":
            assert fast_is_timed.wait(60)
        compile_it(self, name, *arguments)

    monkeypatch.setattr(Compiling, "_compile", slowly)
    context, record = make_context(tmp_path), Context.record

    def watched(self, kind, **fields):
        if kind == "time":
            fast_is_timed.set()
        record(self, kind, **fields)

    monkeypatch.setattr(Context, "record", watched)
    case = cases.Case("2x40", (40, 33), 16, 4, 2, 64, tiny=True)
    tried = [candidates.ours_as(name, candidates.reference(), case) for name in ("slow", "fast")]
    race(context, "decode, blocks of 64", [Entry(case, tried)])
    times = [r for r in read_records(context.records) if r["kind"] == "time"]
    assert [(r["who"], r["late"]) for r in times] == [("fast", False)] * 2 + [("slow", True)] * 2
    assert times[0]["compiling"] == 2


@pytest.mark.parametrize("careful", [False, True])
def test_what_is_being_compiled_is_on_disk_until_it_is_done(tmp_path, careful):
    context, seen = make_context(tmp_path), []
    context.careful = careful

    class Lowered:
        def compile(self, options):
            seen.extend(json.loads(path.read_text()) for path in tmp_path.glob("mark-*.json"))
            return "compiled"

    lowered, who = [("a", Lowered())], "kernel {}".format
    assert compile_in_parallel(context, lowered, timeout_s=30, case="64x4k", who=who) == {"a": "compiled"}
    assert seen == [{"what": "runs" if careful else "compiles", "who": "kernel a", "case": "64x4k"}]


def test_clocks_and_power_stand_beside_what_is_timed(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile :; do echo '1965, 512.5, 61'; echo '1980, [N/A], 60'; sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gauges = Gauges()
    with gauges.watch() as readings:
        time.sleep(1.0)
    gauges.close()
    assert readings == {"sm_mhz": (1965, 1965), "watts": (512.5, 512.5), "celsius": (61, 61)}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with Gauges().watch() as readings:
        pass
    assert readings == {}


def test_swapped_columns_are_found_by_column_head_and_row_and_dumped(tmp_path):
    right = np.random.default_rng(0).standard_normal((3, 2, 4, 128)).astype(np.float32)
    out = right.copy()
    out[1, 1, 2, 64:96], out[1, 1, 2, 96:] = right[1, 1, 2, 96:], right[1, 1, 2, 64:96]
    found = where_wrong(out, right, 4e-2)
    assert [error > 0.1 for error in found["by_columns"]] == [False, False, True, True]
    assert [error > 0 for error in found["by_head"]] == [False, False, True, False]
    assert [error > 0 for error in found["by_row"]] == [False] * 3 + [True] + [False] * 2
    assert found["tile"] == 1
    path = tmp_path / "wrong_tile.npy"
    assert dump_tile(path, out, right, 1) and not dump_tile(path, right, right, 0)
    assert (np.load(path) == np.stack([out[1], right[1]])).all()


@pytest.mark.soak
def test_correctness_begins_with_llamas_shapes_and_hoppers_kernels(tmp_path, monkeypatch):
    assert [(s.num_heads, s.head_dim, s.block_size) for s in correctness.specs(False)[:4]] == [
        (32, 128, 64),
        (32, 128, 64),
        (32, 128, 16),
        (32, 128, 16),
    ]
    asked = []

    def named(name):
        def attend(call, work, *, tuning):
            check_options(call, "q_sink", "sinks", "soft_cap", "return_lse")
            asked.append(name)
            out = candidates.reference()(call)
            return jax.tree.map(lambda x: x * 1.5, out) if name == "triton" else out

        return Kernel(attend, None)

    monkeypatch.setattr(
        correctness, "implementations", lambda: {n: named(n) for n in ("triton", "hopper", "hopper_prefill")}
    )
    context = make_context(tmp_path, "correctness")
    correctness.run(context)
    # Single queries are not for prefill's kernel.
    assert asked == ["hopper"] * 3 + ["triton"] * 3
    checks = [r for r in read_records(context.records) if r["kind"] == "check" and r["who"] == "triton"]
    assert not any(r["right"] for r in checks) and all(r["by_columns"] and r["by_row"] for r in checks)
    fine = [r for r in read_records(context.records) if r["kind"] == "check" and r["who"] == "hopper"]
    assert all(max(r["by_columns"]) == max(r["by_head"]) == 0 for r in fine)
    assert [r for r in checks if "dumped" in r] == checks[:1] and (tmp_path / "wrong_tile.npy").exists()


def test_prefill_says_that_tokamax_is_absent(tmp_path, monkeypatch):
    case = cases.Case("causal", (64,), 16, 4, 2, 64, queries=32, prefill=True, tiny=True)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    context = make_context(tmp_path, "prefill")
    assert len(prefill._peers(context, case)) == 1
    records = read_records(context.records)
    assert "tokamax mosaic (dense): NotImplementedError: tokamax is not installed" in table(
        {"sections": {}, "records": records}
    )


def test_the_parts_of_the_hopper_kernel_are_traced_apart():
    case = cases.Case("2x100", (100, 300), 64, 8, 2, 128, tiny=True)
    a = case.shapes()
    traced = {}
    for part in parts.parts(case):
        carry, shared, owns = jax.eval_shape(part.prepare, a)
        text = str(jax.make_jaxpr(part.step)(carry, shared, owns[0]))
        traced[part.name] = [name in text for name in ("hopper_attention", "hopper_merge")]
        assert jax.eval_shape(part.step, carry, shared, owns[0]) == carry  # a chain feeds it to itself
    assert traced == {parts.ATTENTION: [True, False], parts.MERGE: [False, True]}
    assert parts.hopper_decode.merge_segments.__module__ == "pallas_kernels.hopper.merge"  # and put back


def test_decode_sweeps_pairs_of_stages_and_workers_and_leaves_prefill_out(monkeypatch):
    case = cases.Case("64x4k", (4096,) * 64, 64)
    asked = []

    def attend(call, work, *, tuning):
        asked.append((tuning.stages, tuning.num_workers))
        return Result(None)

    kernels = {
        "hopper_decode": Kernel(attend, Tuning()),
        "hopper_prefill": None,
        "hopper_prefill, weights in shared memory": None,
        "triton_decode": None,
    }
    for module in (candidates, decode):
        monkeypatch.setattr(module, "implementations", lambda: kernels)
    for candidate in decode.sweep(case):
        candidate.step(None, (None,) * 4, 0)
    assert asked == [(2, 264), (2, 396), (4, 132), (5, 132)]
    assert [c.name for c in candidates.ours(case)] == ["hopper_decode", "triton_decode"]
    chunk = cases.Case("chunk", (4096,), 64, queries=32, prefill=True)
    assert [c.name for c in candidates.ours(chunk)] == list(kernels)


def test_a_chain_feeds_each_call_with_the_one_before_and_goes_through_the_layers():
    run = timing.chain(lambda carry, shared, own: carry * shared + own, 3)
    assert int(run(jnp.int32(1), jnp.int32(10), (jnp.int32(1), jnp.int32(2)))) == 1121  # ((1*10+1)*10+2)*10+1


def test_decode_shapes_have_the_bytes_of_the_plan():
    megabytes = {case.name: round(case.bytes / 1e6, 1) for case in cases.decode_cases(64, tiny=False)}
    assert megabytes == {
        "1x4k": 16.8,
        "1x32k": 134.2,
        "8x8k": 268.4,
        "32x4k": 536.9,
        "64x4k": 1073.7,
        "256x512": 536.9,
        "1x128k+31x4k": 1057.0,
    }
    for case in cases.decode_cases(16, tiny=False):
        assert case.num_layers * case.bytes >= cases.ROTATED_BYTES  # nothing is found in the L2


@pytest.mark.soak
def test_arguments_are_of_the_shapes_that_programs_are_compiled_for():
    for case in (
        cases.Case("a", (40, 7), 16, 4, 2, 64, tiny=True),
        cases.Case("b", (70,), 16, 4, 2, 64, queries=32, prefill=True, tiny=True),
        cases.Case("c", (56, 56), 16, 4, 2, 64, shared=32, tiny=True),
    ):
        a = case.arguments()
        assert [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in case.shapes()]
        assert int((a.starts < FAR).sum(axis=1)[0]) == case.blocks_of(case.lengths[0])
    tables = np.asarray(a.tables)
    assert (tables[0, :2] == tables[1, :2]).all() and tables[0, 2:].tolist() != tables[1, 2:].tolist()
    windowed = cases.Case("d", (32768,), 64, pattern=tuple(Pattern(window=1024, num_sinks=4)))
    assert windowed.visible() == 1028


def test_comparison_finds_one_wrong_row_nan_and_a_wrong_log_sum_exp():
    right = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 4, 64)), jnp.float32)
    lse = jnp.zeros((3, 1, 4)).at[2].set(-jnp.inf)
    both, alone = Result(right, lse), Result(right)
    assert correctness.compare(both, both)["right"]
    assert correctness.compare(Result(right.astype(jnp.bfloat16)), alone)["right"]
    wrong_row = right.at[0, 0, 0].multiply(1.05)
    assert not correctness.compare(Result(wrong_row), alone)["right"]
    assert not correctness.compare(Result(right.at[0, 0, 0, 0].set(jnp.nan)), alone)["right"]
    for bad in (lse.at[0].set(0.1), lse.at[0].set(-jnp.inf), lse.at[2].set(0.0), lse.at[1].set(jnp.nan)):
        assert not correctness.compare(Result(right, bad), both)["right"]
    assert not correctness.compare(alone, both)["right"]


def test_a_wrong_candidate_is_timed_but_marked_and_one_that_cannot_run_is_reported(tmp_path, capsys):
    context = make_context(tmp_path)
    case = cases.Case("2x40", (40, 33), 16, 4, 2, 64, tiny=True)

    def wrong(call, work, *, tuning):
        return Result(candidates.reference()(call).out * 1.1)

    def lacking(call, work, *, tuning):
        raise NotImplementedError("a head dim of 64")

    kernels = {"good": candidates.reference(), "bad": Kernel(wrong, None), "lacks": Kernel(lacking, None)}
    tried = [candidates.ours_as(name, kernel, case) for name, kernel in kernels.items()]
    measured = race(context, "decode, blocks of 64", [Entry(case, tried)])
    assert {who for _, who, _ in measured} == {"good", "bad"}
    records = read_records(context.records)
    assert {r["who"]: r["right"] for r in records if r["kind"] == "check"} == {"good": True, "bad": False}
    [failure] = [r for r in records if r["kind"] == "failed"]
    assert failure["unsupported"] and failure["who"] == "lacks"
    results = {"sections": {}, "records": records}
    [row] = [line for line in table(results).splitlines() if line.startswith("decode")]
    assert "good" in row and "WRONG" not in row
    only_bad = {"sections": {}, "records": [r for r in records if r.get("who") != "good"]}
    assert "bad (WRONG)" in table(only_bad)
    # Begun anew after a fault, it measures nothing twice.
    assert race(context, "decode, blocks of 64", [Entry(case, tried)]) == measured


@pytest.mark.soak
def test_throughput_compiles_late_steps_when_they_are_asked_for(tmp_path, monkeypatch):
    def late(context, lowered, **_):
        return {name: TimeoutError("it was not compiled in time") for name, _ in lowered}

    monkeypatch.setattr(throughput, "compile_in_parallel", late)
    monkeypatch.setattr(throughput, "SMALL", dataclasses.replace(throughput.SMALL, num_layers=1))
    context = make_context(tmp_path, "throughput")
    throughput.run(context)
    records = read_records(context.records)
    [ahead] = [r for r in records if r.get("name") == "steps compiled ahead"]
    assert ahead["compiled"] == 0 and set(ahead["late"].values()) == {"it was not compiled in time"}
    [result] = [r for r in records if r["kind"] == "throughput"]
    assert result["output_tokens"] > 0 and result["seconds"]


@pytest.mark.soak
def test_a_decode_step_is_taken_apart(tmp_path):
    config = dataclasses.replace(throughput.SMALL, num_layers=1)
    llm = step.make_llm(config, ((4, 32),), block_size=16)
    some = step_parts.MeasuredStep(llm, 4, 32, "4 rows of 32")
    # On a GPU a step is one program, which is taken apart.
    llm.runner._compiled[some.key] = llm.runner.lower(some.key).compile()
    context = make_context(tmp_path, "step")
    step_parts.take_apart(context, some)
    records = read_records(context.records)
    assert not [r for r in records if r["kind"] == "failed"], records
    assert [r["mode"] for r in records if r["kind"] == "step"] == [
        "without attention and cache",
        "sampling at temperature 1",
        "without command buffers",
    ]
    assert "ENTRY" in gzip.open(tmp_path / "step_after_optimizations.txt.gz", "rt").read()
    assert (tmp_path / "step_kernels.txt").read_text().startswith("a step of 4 rows of 32\n")
    # The network alone needs keys and values too: XLA would leave out their products.
    q, k, v = (jnp.ones((2, n, 4)) for n in (4, 2, 2))
    for changed in ((q, 2 * k, v), (q, k, 2 * v)):
        assert (step_parts._with_all(*changed) != step_parts._with_all(q, k, v)).all()
