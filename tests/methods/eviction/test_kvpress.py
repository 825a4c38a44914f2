"""The engine keeps the tokens that kvpress 0.5.5 keeps, head by head: files in tests/golden/kvpress."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.plugins import resolve
from ksana_jax.core.statistics import Statistics
from ksana_jax.kv.eviction import EVICTION_METHODS
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.layout import HIDDEN, TEXT_POSITION
from ksana_jax.lab.calibration.queries import expected_attention, qfilter
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.load import load_model
from ksana_jax.methods.eviction.h2o import H2O
from tests.golden.kvpress_cases import CONFIG, SCALE, KVPressCase, encode, kvpress_cases, queries, statistics, weights

# What an engine is made for; the other settings can change.
COMPILED = ("method", "kernel", "normalised", "positions", "layers", "beta", "lag_size", "sinks", "chunk_size")
# Arguments of ExpectedAttentionPress, and our names of them.
EXPECTED = {"n_future_positions": "future", "n_sink": "sinks", "use_covariance": "covariance"}
EXPECTED |= {"use_vnorm": "value_norms", "epsilon": "epsilon"}
COMPILED += (*EXPECTED.values(), "of", "first_stage", "alpha", "layerwise")


def pyramid(case: KVPressCase) -> dict[str, Any]:
    """kvpress counts the window within each layer's tokens, a line from `most` to `fewest`; ours comes on top."""
    window, budget = case.settings["window_size"], case.length * (1 - case.settings["compression_ratio"])
    fewest = budget / case.settings["beta"]
    most = 2 * budget - fewest
    if most >= case.length - window:
        most, fewest = case.length - window, 2 * budget - (case.length - window)
    if not case.length >= most >= fewest >= window:
        return {"budget": round(budget)}  # the same in all layers
    return {"budget": round(budget), "layers": "pyramid", "beta": (budget - window) / (fewest - window)}


def settings_of(case: KVPressCase) -> dict[str, Any]:
    """`kv_eviction` for a press. A ratio of evicted tokens is a number of kept ones, without the fraction."""
    given = case.settings
    if "target_size" in given:
        # From `target` to `target + interval - 1` tokens, as many at a time as there come between two evictions.
        interval = given["compression_interval"]
        common = {"budget": given["target_size"] + interval - 1, "interval": interval}
    else:
        common = {"budget": max(int(case.length * (1 - given["compression_ratio"])), 1), "interval": 1}
    match case.press:
        case "KnormPress":
            return common | {"method": "knorm"}
        case "KeyDiffPress":
            return common | {"method": "keydiff"}
        case "LagKVPress":
            return common | {"method": "lagkv", "sinks": given["n_sink"], "lag_size": given["lag_size"]}
        case "TOVAPress":  # keeps the newest token
            return common | {"method": "tova", "recent": 1}
        case "ObservedAttentionPress":  # has no window
            return common | {"method": "h2o", "normalised": True, "recent": 0}
        case "StreamingLLMPress":  # leaves keys rotated as they are
            return common | {"method": "streaming_llm", "sinks": given["n_sink"], "positions": "absolute"}
        case "AdaKVPress":  # of SnapKVPress or KnormPress
            inner = {"method": "knorm"}
            if "window_size" in given:
                common["recent"], inner = given["window_size"], {"method": "snapkv", "kernel": given["kernel_size"]}
            return common | {"method": "adakv", "of": inner, "alpha": given["alpha_safeguard"]}
        case "KVzipPress":
            common["budget"] = round(case.length * (1 - given["compression_ratio"]))
            inner = {
                "method": "kvzip",
                "instruction": encode("\n\nRepeat the previous context exactly.") + encode("\n"),
            }
            own = {"alpha": 0, "sinks": given["n_sink"], "layerwise": given["layerwise"]}
            return common | own | {"method": "adakv", "of": inner}
        case "ChunkKVPress":  # of SnapKVPress; keeps whole chunks
            size = given["chunk_length"]
            num_kept = int(-(-case.length // size) * (1 - given["compression_ratio"]))
            common["budget"] = num_kept * size - -case.length % size  # the last one, in the window, may be shorter
            own = {"recent": given["window_size"], "kernel": given["kernel_size"], "chunk_size": size}
            return common | own | {"method": "chunkkv"}
        case "CriticalKVPress":  # of SnapKVPress, which has means where the engine has sums
            num_sums = given["window_size"] * CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
            stages = {"first_stage": given["first_stage_ratio"], "epsilon": given["epsilon"] * num_sums}
            own = {"of": {"method": "snapkv", "kernel": given["kernel_size"]}, "recent": given["window_size"]}
            return common | own | stages | {"method": "criticalkv"}
        case "QFilterPress":
            return common | {"method": "qfilter"}
        case "ExpectedAttentionPress" | "ExpectedAttentionStatsPress":
            method = "expected_attention" + "_stats" * case.press.startswith("ExpectedAttentionStats")
            own = {ours: given[theirs] for theirs, ours in EXPECTED.items()}
            return common | own | {"method": method}
        case "SnapKVPress" | "PyramidKVPress":
            own = {"method": "snapkv", "recent": given["window_size"], "kernel": given["kernel_size"]}
            return common | own | (pyramid(case) if case.press == "PyramidKVPress" else {})
    raise ValueError(case.press)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("llama")
    (found / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), found / "model.safetensors", metadata={"format": "pt"})
    numbers, model = statistics(), digest_of_files(found)
    numbers |= {"mean": SCALE * numbers["mean"], "covariance": SCALE**2 * numbers["covariance"]}
    for name, kind in (("qfilter", "qfilter"), ("expected_attention_stats", "expected_attention")):
        names = ["filters"] if name == "qfilter" else ["mean", "covariance"]
        arrays = {name: numbers[name] for name in names}
        Statistics(kind, model, "made up", "", 0, {}, arrays).write(found / f"{name}.npz")
    return found


@pytest.fixture(scope="module")
def engine_of(folder):
    """Makes engines that store the text position of each cached token, as for a method that asks for it; one for all
    budgets, one at a time."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (EvictionMethod, H2O):
            patch.setattr(kind, "needs_text_positions", True)

        @functools.lru_cache(maxsize=1)
        def made(fixed: str) -> LLM:
            return LLM(
                folder,
                kv_eviction=json.loads(fixed),
                block_size=1,
                num_blocks=512,
                max_num_seqs=1,
                max_num_batched_tokens=32,
                query_tile=32,
                async_scheduling=False,
            )

        def engine(setting: dict[str, Any]) -> LLM:
            fixed = {name: setting[name] for name in COMPILED if name in setting}
            if getattr(resolve(setting["method"], EVICTION_METHODS, ""), "calibrated_for", None):
                fixed["statistics"] = str(folder / f"{setting['method']}.npz")
            llm = made(json.dumps(fixed | {"budget": 64, "interval": 1}))
            llm.set_kv_eviction(setting)
            return llm

        yield engine


def kept(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[list[int], list[list[list[int]]]]:
    """The model's output, and the text positions [L][K] that are left after that many tokens."""
    asked = SamplingParams(temperature=0, max_tokens=num_tokens + 2, ignore_eos=True, detokenize=False)
    request, scheduler, found = llm.engine.add_request(np.array(prompt), asked), llm.engine.scheduler, []
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.make_moves()
        [*running] = scheduler.order.tolist()
        for row in running:
            rows = scheduler.rows
            length = int(rows.num_computed[row])
            if length != len(prompt) + num_tokens:
                continue
            leaf = np.asarray(llm.runner.cache.leaves[TEXT_POSITION])  # [P, Lg, 1, K, 1]
            for group, at in llm.runner.layout.places:
                blocks = rows.block_tables[group, row][: length - rows.num_evicted[group, row]]
                hidden = llm.runner.cache.leaves.get(HIDDEN, np.zeros(leaf.shape, bool))
                pairs = zip(leaf[blocks, at, 0, :, 0].T, np.asarray(hidden)[blocks, at, 0, :, 0].T, strict=True)
                found.append([head[~gone].tolist() for head, gone in pairs])
    return request.output().outputs[0].token_ids[:num_tokens], found


def by_engine(case: KVPressCase) -> str:
    return repr([settings_of(case).get(name) for name in COMPILED])


@pytest.mark.parametrize(
    "case",
    sorted(kvpress_cases(), key=by_engine),
    ids=lambda case: case.name,
)
def test_each_head_keeps_the_tokens_that_kvpress_keeps(case, engine_of):
    prompt = case.prompt + [5] * (case.press == "KVzipPress")  # evicts before a prompt's last token
    tokens, found = kept(engine_of(settings_of(case)), prompt, len(case.tokens))
    assert tokens == case.tokens
    assert [[head[: len(head) - len(prompt) + case.length] for head in layer] for layer in found] == case.kept


def test_measured_queries_are_those_of_kvpress_and_of_the_authors_code(folder):
    config, params = load_model(folder)
    prompt, expected = np.array([KVPressCase("", {}, 96, 0, [], []).prompt]), queries()
    of_queries, filters = expected_attention(params, config, prompt), qfilter(params, config, prompt)["filters"]
    np.testing.assert_allclose(of_queries["mean"], SCALE * expected["mean"], atol=2e-5)
    np.testing.assert_allclose(of_queries["covariance"][:, 5], SCALE**2 * expected["covariance"], atol=2e-5)
    np.testing.assert_allclose(filters, expected["filters"], atol=1e-4)
