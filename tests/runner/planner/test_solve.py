"""The plan: the sum of its terms, and that a size said to fit fits while one more does not."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.config import MAX_TOKENS, ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.shared_kv import shared_by
from ksana_jax.runner.planner import plan
from ksana_jax.runner.planner.formula import Memory
from ksana_jax.runner.planner.request import PlanRequest
from ksana_jax.runner.planner.step_memory import NO_STEP
from tests.runner.planner.models import FOLDER, STEP, read

GIB = 2**30
LLAMA = read("llama-2-7b")


def made(model=LLAMA, device="a100-80g", **request):
    return plan(model, device, step=STEP, **request)


def kv_bytes(batch, context, config=LLAMA):
    """Bytes of keys and values that a batch of texts holds."""
    memory = Memory.of(config, PlanRequest(), GIB, NO_STEP)
    return memory.beta * memory.tokens_held(batch, context)


def test_llama_2_7b_holds_512_mib_for_two_texts_of_512_or_one_of_1024():
    assert kv_bytes(2, 512) == kv_bytes(1, 1024) == 512 * 2**20
    assert kv_bytes(1, 1024, dataclasses.replace(LLAMA, num_kv_heads=1)) == 16 * 2**20


def test_layers_that_share_keys_and_values_hold_half_the_bytes_or_twice_the_tokens():
    shared = dataclasses.replace(LLAMA, kv_layers=shared_by(2, LLAMA.num_layers))
    assert 2 * kv_bytes(2, 512, shared) == kv_bytes(2, 512)
    whole, half = (Memory.of(model, PlanRequest(), 8 * GIB, NO_STEP) for model in (LLAMA, shared))
    matrices = 16 * 2 * LLAMA.d_model**2 * 2  # of keys and values, in bf16
    assert whole.weights - half.weights == matrices
    half = dataclasses.replace(half, weights=0)
    assert half.max_kv_tokens(1, 4096) == 2 * dataclasses.replace(whole, weights=0).max_kv_tokens(1, 4096)


def test_two_devices_that_share_the_kv_heads_each_hold_twice_the_tokens():
    whole = Memory.of(LLAMA, PlanRequest(), 8 * GIB, NO_STEP)
    whole = dataclasses.replace(whole, weights=0)  # how weights are shared is not for the pool to say
    local = dataclasses.replace(whole, layout=whole.layout.local(2))
    assert local.beta * 2 == whole.beta
    assert local.max_kv_tokens(1, 4096) == 2 * whole.max_kv_tokens(1, 4096) == 2 * 8 * GIB // whole.beta


REQUESTS = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["f32", "bf16"])},
    optional={
        "batch": st.integers(1, 300),
        "context": st.integers(1, 20_000),
        "embedding_device": st.sampled_from(["device", "host"]),
        "memory_fraction": st.floats(0.1, 1.0),
        "block_size": st.sampled_from([1, 8, 16, 100]),
    },
)
SHARED_OR_WINDOW = st.one_of(
    st.just({}),
    st.floats(0, 0.99).map(lambda share: {"prefix_share": share}),
    st.builds(lambda window, sinks: {"window": window, "num_sinks": sinks}, st.integers(1, 9000), st.integers(0, 8)),
)
DEVICES = st.sampled_from(["h200", "a100-80g", "a100-40g", "v100-32g", "24GiB", "8GiB"])


@given(REQUESTS, SHARED_OR_WINDOW, DEVICES)
def test_the_terms_add_up(request, more, device):
    found = made(device=device, **request, **more)
    assert found.total_bytes == (
        found.weights_bytes
        + found.step_bytes
        + found.alpha_bytes_per_request * found.batch
        + found.kv_bytes_per_token * found.tokens_held
    )
    assert found.tokens_held == pytest.approx(found.gamma * found.batch * found.context)
    assert found.fits == (found.total_bytes <= found.budget_bytes)


@given(REQUESTS, SHARED_OR_WINDOW, DEVICES)
def test_what_is_said_to_fit_fits_and_one_more_does_not(request, more, device):
    request = request | more
    found = made(device=device, **request)

    def fits(**changed):
        return made(device=device, **(request | changed)).fits

    at = {"batch": found.batch, "context": found.context}
    if found.max_batch:
        assert fits(**at | {"batch": found.max_batch})
    assert not fits(**at | {"batch": found.max_batch + 1})
    if found.max_context:
        assert fits(**at | {"context": found.max_context})
    if found.max_context < MAX_TOKENS:
        assert not fits(**at | {"context": found.max_context + 1})
    if "prefix_share" not in request:
        if found.max_window is not None:
            assert fits(**at | {"window": found.max_window})
        if found.max_window is None or found.max_window < found.context:
            assert not fits(**at | {"window": (found.max_window or 0) + 1})
    left = found.budget_bytes - found.total_bytes + found.kv_bytes_per_token * found.tokens_held
    block = found.request.block_size * found.kv_bytes_per_token
    assert found.max_kv_tokens * found.kv_bytes_per_token == max(left // block, 0) * block


@given(SHARED_OR_WINDOW, st.integers(1, 400), st.integers(1, 9000))
def test_more_requests_or_longer_texts_never_take_less(more, batch, context):
    memory = Memory.of(LLAMA, PlanRequest(**more), GIB, STEP)
    total = memory.total(batch, context)
    assert memory.total(batch + 1, context) > total
    assert memory.total(batch, context + 1) >= total


def test_a_larger_device_holds_more():
    plans = [made(device=name) for name in ("v100-32g", "a100-40g", "a100-80g", "h200")]
    for name in ("max_batch", "max_context", "max_kv_tokens"):
        values = [getattr(p, name) for p in plans]
        if name == "max_context":
            continue  # at the largest batch of each
        assert values == sorted(values) and values[0] < values[-1]
    contexts = [made(device=name, batch=2).max_context for name in ("v100-32g", "a100-40g", "a100-80g", "h200")]
    assert contexts == sorted(contexts) and contexts[0] < contexts[-1]


def test_a_window_takes_the_limit_off_the_context():
    full, windowed = made(batch=16), made(batch=16, window=1024, num_sinks=4)
    assert full.max_context < 20_000
    assert windowed.max_context == MAX_TOKENS
    assert made(batch=16, window=1024, context=10**6).tokens_held == windowed.tokens_held - 16 * 16  # a block of sinks
    assert windowed.gamma < 0.3 and full.gamma == 1


def test_a_window_of_the_model_itself_counts():
    sliding = dataclasses.replace(LLAMA, pattern=AttentionPattern(window=1024))
    assert made(sliding, batch=16).max_context == MAX_TOKENS
    # One layer that attends to everything keeps everything, the others the blocks of their window.
    mixed = dataclasses.replace(LLAMA, pattern=(AttentionPattern(),) + (AttentionPattern(window=1024),) * 31)
    found = made(mixed, batch=16, context=65_536)
    assert found.gamma == pytest.approx((65_536 + 31 * 1040) / (32 * 65_536), rel=0.02)  # and a chunk
    assert found.total_bytes == pytest.approx(
        made(batch=16, context=65_536).total_bytes - (1 - found.gamma) * 16 * 65_536 * found.kv_bytes_per_token,
        rel=0.01,
    )


def test_a_shared_prefix_is_held_once():
    alone, shared = made(batch=10, context=1000), made(batch=10, context=1000, prefix_share=0.8)
    # 63 blocks, of which 50 are shared.
    assert alone.tokens_held == 10 * 63 * 16
    assert shared.tokens_held == (50 + 10 * 13) * 16


def test_changes_are_the_plans_of_what_they_name():
    found = made(context=2048)
    changes = {c.name: c for c in found.changes}
    windowed = made(context=2048, batch=found.batch, window=512, num_sinks=4)
    change = changes["window 512 + 4 sinks"]
    assert (change.max_batch, change.max_context) == (windowed.max_batch, windowed.max_context)
    host = made(context=2048, batch=found.batch, embedding_device="host")
    change = changes["embedding on the host"]
    assert (change.weights_bytes, change.max_kv_tokens) == (host.weights_bytes, host.max_kv_tokens)
    assert host.host_bytes == 32_000 * 4096 * 2 == found.weights_bytes - host.weights_bytes
    exact = made(context=2048, dtype="f32")
    change = {c.name: c for c in exact.changes}["weights and KV in bf16"]
    assert (change.kv_bytes_per_token * 2, change.weights_bytes * 2) == (exact.kv_bytes_per_token, exact.weights_bytes)
    # Codes of one byte, and a float32 scale for each key and value of 128 numbers.
    assert changes["KV in int8"].kv_bytes_per_token * 2 * 128 == found.kv_bytes_per_token * (128 + 4)
    stored = made(context=2048, kv_cache_dtype="int8")
    assert changes["KV in int8"].max_batch == stored.max_batch > found.max_batch
    assert "KV in int8" not in {c.name for c in stored.changes}
    assert changes["MQA, 1 kv head"].kv_bytes_per_token * 32 == found.kv_bytes_per_token
    assert changes["GQA, 8 kv heads"].kv_bytes_per_token * 4 == found.kv_bytes_per_token


def test_a_model_larger_than_the_device_has_room_for_nothing():
    found = made(device="8GiB")
    assert (found.max_batch, found.max_context, found.max_kv_tokens, found.max_window) == (0, 0, 0, None)
    assert not found.fits and found.total_bytes > found.budget_bytes


def test_a_model_is_a_directory_a_config_json_or_an_embedded_one(monkeypatch):
    assert made(FOLDER / "llama-2-7b") == made(str(FOLDER / "llama-2-7b" / "config.json"))
    assert made("ksana-tiny").model == "ksana-tiny"
    monkeypatch.chdir(FOLDER)
    assert made("llama-2-7b/config.json").model == "llama-2-7b"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4', must be one of f32, bf16, f16"),
        ({"kv_cache_dtype": "int5"}, "kv_cache_dtype is 'int5', must be one of f32, bf16, f16, int8"),
        ({"batch": 0}, "batch is 0, must be an integer from 1 or None"),
        ({"context": 2**30}, "context is 1,073,741,824, must be an integer from 1 to 1,073,741,823 or None"),
        ({"window": -1}, "window is -1, must be an integer from 1"),
        ({"num_sinks": 4}, "num_sinks is 4, but window is None"),
        ({"prefix_share": 1.0}, "prefix_share is 1.0, must be a number from 0 and below 1"),
        ({"prefix_share": 0.5, "window": 64}, "a window frees the shared prefix"),
        ({"memory_fraction": 0.0}, "memory_fraction is 0.0, must be a number above 0 and at most 1"),
        ({"embedding_device": "disk"}, "embedding_device is 'disk', must be one of device, host"),
        ({"bach": 4}, "plan has no argument bach"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(request_, message, monkeypatch):
    from ksana_jax.runner.planner import solve

    monkeypatch.setattr(solve, "measure_step", None)
    with pytest.raises(ConfigError, match=message):
        plan(LLAMA, "h200", **request_)


def test_a_tied_embedding_cannot_rest_on_the_host():
    with pytest.raises(ConfigError, match=r"output head too \(tied\)"):
        made(dataclasses.replace(LLAMA, tie_embeddings=True), embedding_device="host")
    tied = made(dataclasses.replace(LLAMA, tie_embeddings=True))
    assert "embedding on the host" not in {c.name for c in tied.changes}


def test_models_that_are_not_there_are_named():
    with pytest.raises(LoadError, match=r"there is no model 'nowhere'; supported: a directory or \.gguf file"):
        made("nowhere")
    with pytest.raises(LoadError, match=r"is a file; supported: a directory, its config\.json, or a \.gguf file"):
        made(__file__)
