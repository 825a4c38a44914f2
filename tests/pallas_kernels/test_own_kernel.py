"""A kernel added as CONTRIBUTING says: one function and an entry in KERNELS; and an implementation made of it."""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.operator_settings import IMPLEMENTATION_NAMES
from ksana_jax.ops import implementations, kernel_limits, kernels
from ksana_jax.ops.implementations import Implementation, PagedAttention, explain
from pallas_kernels import arguments
from pallas_kernels.contract import Call, Kernel, Result, check_options
from pallas_kernels.patterns import Pattern
from pallas_kernels.registry import KERNELS
from tests.engine.small import VOCAB, make_llm, tokens_of
from tests.kernel_report import cases
from tests.pallas_kernels.contract import check

NAME = "one_program_a_tile"


@dataclasses.dataclass(frozen=True)
class Tuning:
    interpret: bool = False


def _attend_tile(q_ref, kv_ref, tables_ref, starts_ref, positions_ref, numbers_ref, out_ref, lse_ref):
    """One program: a tile of queries against all slots of its table."""
    tile, (*numbers, layer) = pl.program_id(0), (numbers_ref[i] for i in range(len(Pattern._fields) + 1))
    q, blocks = q_ref[tile].astype(jnp.float32), kv_ref[...][tables_ref[tile], layer].astype(jnp.float32)
    num_blocks, _, num_kv_heads, block_size, head_dim = blocks.shape
    kv_pos = (starts_ref[tile][:, None] + jnp.arange(block_size)).reshape(-1)
    seen = Pattern(*numbers).visible(positions_ref[tile][:, None], kv_pos)[:, None]
    k, v = blocks.transpose(1, 2, 0, 3, 4).reshape(2, num_kv_heads, num_blocks * block_size, head_dim)
    k, v = (jnp.repeat(x, q.shape[1] // num_kv_heads, axis=0) for x in (k, v))
    scores = jnp.where(seen, jnp.einsum("QNH,NCH->QNC", q, k), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0)
    v = jnp.where(seen.any(axis=0)[..., None], v, 0)  # where no query attends may be NaN
    out_ref[tile] = jnp.einsum("QNC,NCH->QNH", weights, v).astype(out_ref.dtype)
    lse_ref[tile] = lse


def attend(call: Call, work: None = None, *, tuning: Tuning) -> Result:
    check_options(call, "return_lse", "out_dtype")
    if not jnp.issubdtype(call.pool.kv.dtype, jnp.floating):
        raise NotImplementedError(f"keys and values in {call.pool.kv.dtype}; this kernel takes floating point")
    if (group := call.group) > 4:
        raise NotImplementedError(f"{group} query heads to a kv head; this kernel takes up to 4")
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (*call.effective_pattern, call.layer)])
    outputs = (
        jax.ShapeDtypeStruct(call.q.shape, call.out_dtype),
        jax.ShapeDtypeStruct(call.q.shape[:3], jnp.float32),
    )
    kernel = pl.pallas_call(_attend_tile, out_shape=outputs, grid=(len(call.q),), interpret=tuning.interpret, name=NAME)
    out, lse = kernel(call.q, call.pool.kv, call.tables, call.starts, call.positions, numbers)
    return Result(out, lse if call.options.return_lse else None)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(KERNELS, NAME, Kernel(attend, Tuning()))


@pytest.mark.parametrize(
    "spec",
    [
        arguments.Spec(rows=((40, 1), (0, 0), (16, 1)), return_lse=True),
        arguments.Spec(rows=((75, 9), (1, 1)), q_tile=4, pattern=arguments.DILATED, dtype="float16", evict_every=3),
    ],
    ids=str,
)
def test_it_is_held_to_the_reference_by_the_specs_of_all_kernels(spec):
    check(KERNELS[NAME].tuned(interpret=True), spec)


def test_what_it_does_not_support_is_known_without_running_it():
    kernel, call = KERNELS[NAME], arguments.make(arguments.Spec(rows=((40, 1),)))
    assert kernel.unsupported(call) is None
    assert kernel.unsupported(call.replace(soft_cap=30.0)) == "this kernel does not support soft_cap"
    wide = arguments.make(arguments.Spec(rows=((40, 1),), num_heads=16))
    assert kernel.unsupported(wide) == "8 query heads to a kv head; this kernel takes up to 4"


def test_its_compile_checks_are_shapes():
    assert [str(case) for case in cases.attention(NAME, KERNELS[NAME], ({}, {"h": 64}))] == [NAME, f"{NAME} h=64"]


def test_an_engine_serves_with_it(monkeypatch):
    toy = kernels.Kernels(*(KERNELS[NAME].tuned(interpret=True),) * 2)
    made = PagedAttention(toy.write, toy.attend)
    entry = Implementation("toy", lambda: made, lambda needs: kernel_limits.unsupported(toy, needs))
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", (entry, *implementations.IMPLEMENTATIONS))
    names = IMPLEMENTATION_NAMES["attention"]
    monkeypatch.setitem(IMPLEMENTATION_NAMES, "attention", (*names, "toy"))
    prompts = np.random.default_rng(0).integers(2, VOCAB, (2, 20)).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    found = {}
    for name in ("toy", "xla"):
        llm = make_llm(operators={"attention": name}, programs={})
        assert llm.runner.implementation.name == name
        found[name] = tokens_of(llm, prompts, greedy)
    assert found["toy"] == found["xla"]
    # bfloat16 rests as its bits in the pool of a CPU.
    assert explain()[0] == ("toy", False, "keys and values in uint16; this kernel takes floating point")
