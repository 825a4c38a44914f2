"""The engine's greedy tokens with each implementation of attention against all of XLA's operators; its launches.

The list of launches that XLA writes for each program says which of them are in command buffers (CUDA graphs).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.gpu.context import Context
from experiments.gpu.llama import XLA, random_params
from tests.kernel_report.report import count_thunks

# Fewer tokens apart than this in log-probability are a tie for bfloat16: either may come first.
TIE = 0.05


def run(context: Context) -> None:
    from ksana_jax.core.config import ModelConfig
    from ksana_jax.devices.capabilities import stored_as_bits
    from ksana_jax.kv.model_layout import layout_of
    from ksana_jax.ops.implementations import IMPLEMENTATIONS, explain
    from ksana_jax.ops.requirements import Requirements

    for name, used, why in explain():
        context.record("fact", name="implementation", who=name, used=used, why=why)
        context.say(f"{name}: {'used' if used else 'not used'}: {why}")
    typical = ModelConfig(num_heads=16, num_kv_heads=4, head_dim=128)
    size, as_bits = _settings(context)["block_size"], stored_as_bits(jax.devices()[0])
    needs = Requirements.of(typical, layout_of(typical, dtype="bf16", block_size=size, as_bits=as_bits))
    able = [i for i in IMPLEMENTATIONS if i.unsupported(needs) is None]
    reference = next(i for i in able if i.name == "xla")
    for label, make in (("random Llama, 4 layers, head dim 128", _random), ("ksana-tiny", _tiny)):
        if context.left() < 5:
            context.record("fact", name="left out", model=label)
            continue
        right = context.attempt(f"{label} with xla", lambda m=make: _tokens(context, m, reference))
        if right is None:
            continue
        for implementation in able:
            if (implementation is reference and len(able) > 1) or context.excluded(implementation.name, label):
                continue

            def guarded(make=make, implementation=implementation, label=label) -> list[Any]:
                with context.guard(implementation.name, label, seconds=40):  # its compilations included
                    return _tokens(context, make, implementation)

            found = context.attempt(f"{label} with {implementation.name}", guarded)
            if found is not None:
                _compare(context, label, implementation.name, found, right)
    _launches(context)


def _settings(context: Context) -> dict[str, Any]:
    return {
        "dtype": "bf16",
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "num_blocks": 400,
        "max_num_batched_tokens": 128,
        "query_tile": 32,
    }


def _tiny(context: Context, operators: dict[str, str]):
    from ksana_jax.engine.llm import LLM

    return LLM("ksana-tiny", operators=operators, **_settings(context))


def _random(context: Context, operators: dict[str, str]):
    from ksana_jax.core.config import ModelConfig
    from ksana_jax.engine.llm import LLM

    small = (64, 2, 4, 2, 64, 128) if context.tiny else (2048, 4, 16, 4, 128, 4096)
    names = ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff")
    config = ModelConfig(vocab_size=1024, **dict(zip(names, small)))
    return LLM.from_params(config, random_params(config), operators=operators, **_settings(context))


def _tokens(context: Context, make, implementation) -> list[Any]:
    """Greedy completions of 16 prompts of 3 to 150 tokens, with the two most probable tokens of each place."""
    from ksana_jax.core.request import SamplingParams

    llm = make(context, XLA if implementation.name == "xla" else {"attention": implementation.name})
    rng = np.random.default_rng(5)
    lengths = (3, 20, 5, 33) if context.tiny else rng.integers(3, 150, 16)
    prompts = [{"prompt_token_ids": rng.integers(3, llm.model_config.vocab_size, n).tolist()} for n in lengths]
    params = SamplingParams(
        temperature=0, max_tokens=8 if context.tiny else 64, ignore_eos=True, detokenize=False, logprobs=2
    )
    outputs = llm.generate(prompts, params)
    places = {str(d) for leaf in jax.tree.leaves((llm.runner.params, llm.runner.cache)) for d in leaf.devices()}
    context.record(
        "fact",
        name="engine",
        who=implementation.name,
        compilations=llm.num_compilations,
        weights_and_pool_on=sorted(places),
    )
    return [o.outputs[0] for o in outputs]


def _compare(context: Context, label: str, name: str, found: list[Any], right: list[Any]) -> None:
    """Where tokens diverge, the XLA path's two best tokens show whether it was a tie."""
    equal, apart = 0, []
    for index, (a, b) in enumerate(zip(found, right, strict=True)):
        if a.token_ids == b.token_ids:
            equal += 1
            continue
        place = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y)
        best = sorted((p.logprob for p in b.logprobs[place].values()), reverse=True)
        apart.append({"request": index, "place": place, "gap": best[0] - best[1]})
    real = sum(p["gap"] > TIE for p in apart)
    context.record("fact", name="tokens apart", model=label, who=name, apart=apart)
    context.value(f"greedy tokens, {label}: {name} as xla", equal, f"of {len(right)} requests")
    context.value(f"greedy tokens, {label}: {name} apart where there was no tie", real, "requests", bar=0, speed=False)


def _launches(context: Context) -> None:
    """From each program's list of launches after XLA's passes: how many are in command buffers."""
    files = sorted((context.folder / "xla").glob("*thunk_sequence_after_thunk_passes.txt"))
    if not files:
        context.record("fact", name="launches", note="XLA wrote no lists of launches (it does for GPUs)")
        return
    for path in files:
        text = path.read_text(errors="replace")
        if len(text.splitlines()) < 30 or not re.search(r"jit__?run", path.name):
            continue  # not a step
        inside, outside = count_thunks(text)
        total = sum(inside.values()) + sum(outside.values())
        context.record("fact", name="launches", program=path.name, inside=inside, outside=outside)
        context.value(
            f"launches in command buffers, {_program(path)}",
            100 * sum(inside.values()) / max(total, 1),
            f"% of {total}, outside: {dict(outside) or 'none'}",
        )


def _program(path: Path) -> str:
    return path.name.split(".")[0] + " " + path.name.split(".")[1]
