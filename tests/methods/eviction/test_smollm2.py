"""Eviction on a real model at the size of a study; tests/golden/make_smollm2_eviction.py has the definitions."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.kv.eviction.apportioning import measured_budgets
from ksana_jax.lab.runs.asking import token_scores
from ksana_jax.loading import load_model
from ksana_jax.models import make_rope
from ksana_jax.models.transformer import forward
from ksana_jax.ops.low_slots import LowSlots
from ksana_jax.scheduler import row_eviction
from tests import real
from tests.methods.eviction.defined import in_8_bits
from tests.methods.eviction.reference import Head, Rule, evict, pooled

pytestmark = [pytest.mark.soak, real.smollm2]
RECORDED = json.loads((Path(__file__).parents[2] / "golden" / "smollm2_eviction.json").read_text())
ONCE = {"budget": 128, "recent": 0, "interval": 1, "prompts": "once"}
SINKS = {"method": "streaming_llm", "sinks": 4}
SETTINGS = {
    "full": None,
    "tova": ONCE | {"method": "tova"},
    "keydiff": ONCE | {"method": "keydiff"},
    "snapkv": ONCE | {"method": "snapkv", "budget": 64, "recent": 32},
    "h2o": ONCE | {"method": "h2o", "budget": 64, "recent": 32},
    "streaming_llm": ONCE | SINKS | {"positions": "absolute"},
    "streaming_llm, streamed": ONCE | SINKS | {"positions": "cache", "prompts": "streamed"},
}


def engine(name):
    return LLM("smollm2", max_model_len=704, max_num_seqs=1, max_num_batched_tokens=128, kv_eviction=SETTINGS[name])


@pytest.mark.parametrize("name", RECORDED["mean_logprob"])
def test_log_likelihoods_are_those_of_the_definition(name):
    ids, setting, llm = RECORDED["token_ids"], SETTINGS[name], engine(name)
    prompt, first = {"prompt_token_ids": ids[:512], "question_token_ids": ids[512:]}, 512
    if setting is None:
        prompt = {"prompt_token_ids": ids}
    elif setting["prompts"] == "streamed":
        prompt, first = {"prompt_token_ids": ids[:512]}, 128
    [scores] = token_scores(llm, [prompt])
    found = sum(score.logprob for score in scores[first - 1 :]) / len(scores[first - 1 :])
    # float32, with keys in another order: single tokens differ by 5e-5, their mean by 1e-6.
    assert found == pytest.approx(RECORDED["mean_logprob"][name], abs=1e-5)


@pytest.mark.parametrize("name", RECORDED["mean_logprob"])
def test_decoded_log_likelihoods_are_those_of_the_definition(name):
    ids, streamed = RECORDED["token_ids"], name.endswith("streamed")
    prompt, forced = (ids[:128], ids[128:512]) if streamed else (ids[:512], ids[512:])
    asked = SamplingParams(forced_token_ids=forced, max_tokens=None, logprobs=0, detokenize=False)
    [output] = engine(name).generate({"prompt_token_ids": prompt}, asked)
    # As above.
    assert output.outputs[0].cumulative_logprob / len(forced) == pytest.approx(RECORDED["mean_logprob"][name], abs=1e-5)


def attention(ids):
    """Yields each layer's number, keys and values [C, K, H] and weights [K, G, T, C] of a text, in float64."""
    config, params = load_model("smollm2")
    rope, at, found = make_rope(config.rope, config.head_dim), jnp.arange(len(ids)), []

    def attend(layer, q, k, v, state):
        q, k = (rope.rotate(x, rope.angles(at)) for x in (q, k))
        grouped = q.reshape(len(q), config.num_kv_heads, -1, config.head_dim) * config.head_dim**-0.5
        scores = jnp.einsum("tkgh,ckh->kgtc", grouped, k, precision="highest")
        weights = jax.nn.softmax(jnp.where(jnp.tri(len(q), dtype=bool), scores, -jnp.inf))
        found.append((layer, k, v, weights))
        return jnp.einsum("kgtc,ckh->tkgh", weights, v, precision="highest").reshape(q.shape), state

    forward(params, jnp.array(ids), attend, None, config=config)
    for layer, *arrays in found:
        yield layer, *(np.asarray(x, np.float64) for x in arrays)


def test_d2o_merges_keys_and_values_as_its_definition_does():
    """Of three layers, against float64 from the same keys, values and sums."""
    ids, settings = RECORDED["token_ids"][:512], ONCE | {"method": "d2o", "budget": 64, "recent": 16}
    llm = LLM("smollm2", max_model_len=704, max_num_seqs=1, max_num_batched_tokens=128, kv_eviction=settings)
    layers = {0, 14, 29}
    found = {layer: (k, v, weights.sum((1, 2))) for layer, k, v, weights in attention(ids) if layer in layers}
    request = llm.engine.add_request(np.array(ids), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    rows = llm.engine.scheduler.rows
    while not len(order := llm.engine.scheduler.order) or not rows.num_evicted[0, order[0]]:
        llm.engine.step()
    llm.engine.make_moves()
    rule = Rule("sums", [64] * 30, 1, recents=[16] * 30, sinks=4, once=True, smoothing=0.7)
    tables, size = rows.block_tables[0, order[0]], llm.config.block_size
    slots, pool = np.arange(64), np.asarray(llm.runner.cache.kv)
    for layer in layers:
        k, v, sums = found[layer]
        heads = [
            Head(
                list(range(512)),
                stored=dict(enumerate(k[:, h])),
                values=dict(enumerate(v[:, h])),
                scores=dict(enumerate(sums[h])),
            )
            for h in range(k.shape[1])
        ]
        before = [np.array([head.values[j] for j in range(512)]) for head in heads]
        evict(rule, layer, heads, 512, 512)
        stored = pool[tables[slots // size], layer, :, :, slots % size].astype(np.float64)  # [64, 2, K, H]
        for number, head in enumerate(heads):
            wanted = np.array([[of[j] for j in head.kept] for of in (head.stored, head.values)])
            # float32 through 30 layers, against keys of up to 20.
            np.testing.assert_allclose(stored[:, :, number].swapaxes(0, 1), wanted, atol=2e-3)
            moved = np.abs(wanted[1] - before[number][head.kept]).max(axis=-1)
            assert 5 < (moved > 0.05).sum() < 60  # some tokens stay as they were
    llm.engine.abort(request.request_id)


def test_cake_divides_the_budget_as_its_definition_does(monkeypatch):
    """In float64, from the weights that the last queries of a prompt give in all layers."""
    ids, window, preferences = RECORDED["token_ids"][:512], 32, []
    for _, _, _, weights in attention(ids):
        last = weights[:, :, -window:, :-window]
        preferences.append(-(last * np.log(last + 1e-10)).sum() * last.var(axis=2, ddof=1).sum())
    found = []

    def spied(schedule, measured, num_prompt):
        entropy, variance = measured.sum(axis=(1, 2), dtype=np.float64).T
        found.append((entropy * variance, schedule.method.budgets(measured[:, 0], 128, num_prompt)))
        return measured_budgets(schedule, measured, num_prompt)

    monkeypatch.setattr(row_eviction, "measured_budgets", spied)
    settings = {"method": "cake", "budget": 128}
    llm = LLM("smollm2", max_model_len=1025, max_num_seqs=1, max_num_batched_tokens=256, kv_eviction=settings)
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=2, temperature=0))
    [(preference, budgets)] = found
    # float32: variances are differences of sums over 32 queries.
    np.testing.assert_allclose(preference, preferences, rtol=2e-3)
    shares = np.array(preferences) / sum(preferences) * len(preferences) * (128 - window)
    assert (shares < 512 - window).all(), "none is cut off at the prompt"
    np.testing.assert_allclose(budgets, window + shares, atol=1)
    assert budgets.max() > 1.5 * budgets.min()


def test_adakv_divides_each_layers_budget_as_its_definition_does():
    """By the tokens that a layer's heads keep, from the weights of a prompt's last queries in float64."""
    ids, window, budget = RECORDED["token_ids"][:512], 32, 64
    settings = {"method": "adakv", "of": {"method": "snapkv"}, "budget": budget, "recent": window, "interval": 1}
    settings |= {"alpha": 0.75, "sinks": 0}
    llm = LLM("smollm2", max_model_len=704, max_num_seqs=1, kv_eviction=settings, kept_tokens=True)
    [output] = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    kept = output.outputs[0].kept_tokens[:, :, : len(ids)]
    for layer, _, _, weights in attention(ids):
        sums = weights[:, :, -window:, :-window].sum((1, 2))
        scores = np.array([pooled(head, 5, "avg") for head in sums])
        safe = np.argsort(-scores, axis=1)[:, : int(0.75 * budget) - window]
        np.put_along_axis(scores, safe, np.inf, axis=1)
        least = np.sort(scores.ravel())[::-1][len(scores) * (budget - window) - 1]
        # float32: tokens whose scores are as good as equal may change places.
        unsure = np.isclose(scores, least, rtol=1e-4, atol=0)
        assert unsure.sum() < 4
        assert ((kept[layer, :, :-window] == (scores >= least)) | unsure).all() and kept[layer, :, -window:].all()
    assert len({*kept[14].sum(axis=1).tolist()}) > 1, "heads keep different numbers"


def test_mikv_keeps_tokens_in_few_bits_as_its_definition_does():
    """Of three layers, against float64 from the same keys, values and sums."""
    ids, layers = RECORDED["token_ids"][:512], {0, 14, 29}
    settings = ONCE | {"method": "mikv", "codec": "fp8_e5m2", "share": 0.5, "budget": 256, "recent": 16, "sinks": 4}
    llm = LLM("smollm2", max_model_len=704, max_num_seqs=1, max_num_batched_tokens=128, kv_eviction=settings)
    request = llm.engine.add_request(np.array(ids), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    rows = llm.engine.scheduler.rows
    while not len(order := llm.engine.scheduler.order) or not rows.num_evicted[0, order[0]]:
        llm.engine.step()
    llm.engine.make_moves()
    rule = Rule("sums", [256] * 30, 1, recents=[16] * 30, sinks=4, once=True, low=in_8_bits, per_slot=4, share=0.5)
    tables = jnp.asarray(rows.block_tables[0, order[:1], : 256 // llm.config.block_size])
    slots = np.arange(256)
    for layer, k, v, weights in attention(ids):
        if layer not in layers:
            continue
        cache, low = llm.runner.cache, LowSlots.of(llm.runner.cache, layer, llm.runner.layout.eviction.method, 64)
        counts = np.asarray(low.counts(tables))[0]
        few, exact = (np.asarray(of) for of in low.read(tables)), (np.asarray(of) for of in cache.read(layer, tables))
        (few_k, few_v), (exact_k, exact_v) = few, exact
        sums = weights.sum((1, 2))
        for number in range(len(counts)):
            head = Head(
                list(range(512)),
                stored=dict(enumerate(k[:, number])),
                values=dict(enumerate(v[:, number])),
                scores=dict(enumerate(sums[number])),
            )
            evict(rule, layer, [head], 512, 512)
            is_low = counts[number] > 0
            assert is_low.sum() == -(-len(head.low) // 4) and len(head.kept) == (~is_low).sum()
            wanted = np.array([[of[j] for j in head.kept] for of in (head.stored, head.values)])
            found = np.array([exact_k[0, number, slots[~is_low]], exact_v[0, number, slots[~is_low]]])
            np.testing.assert_allclose(found, wanted, atol=2e-3)  # as above
            used = np.flatnonzero(np.arange(4) < counts[number][:, None])
            wanted = np.array([[of[j] for j in head.low] for of in (head.stored, head.values)])
            found = np.array([few_k[0, number, used], few_v[0, number, used]])
            # Two bits after the point; numbers in the middle between two of e5m2 are rounded up or down.
            same = np.isclose(found, wanted, atol=1e-6)
            assert same.mean() > 0.999 and np.isclose(found, wanted, rtol=0.25, atol=1e-4).all()
    llm.engine.abort(request.request_id)
