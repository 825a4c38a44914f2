"""Where weights and blocks are: each device has its part, the host has each kv head once, a disk serves any number."""

import dataclasses

import jax
import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.core.config import ConfigError
from ksana_jax.core.operator_settings import OperatorSettings
from ksana_jax.kv.moves import Moves
from ksana_jax.loading import load as loading
from ksana_jax.loading import load_model
from ksana_jax.loading.stored_tensor import StoredTensor
from ksana_jax.runner.planner.step_memory import program_bytes, step_bytes
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from ksana_jax.sharding.placing import place_on
from ksana_jax.sharding.shares import local_model
from tests.loading.models_on_disk import TINY, random_tensors, write_model
from tests.sharding.on_devices.engines import GREEDY, MHA, MODELS, PROMPTS, make_llm, params_of, tokens_of

# Query heads, kv heads and hidden units that four devices divide; of 300 ids the last device has padding alone.
ON_DISK = dataclasses.replace(TINY, vocab_size=300, num_heads=4, num_kv_heads=2, d_ff=64, tie_embeddings=False)


def on_devices(x: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def test_each_device_reads_its_part_of_a_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    tensors = random_tensors(ON_DISK)
    path = write_model(tmp_path, tensors, ON_DISK)
    read, held, chunks, empty = [], [], StoredTensor.chunks, loading.aligned_empty

    def counted(*arguments):
        for rows, piece in chunks(*arguments):
            read.append((arguments[0].name, piece.size))
            yield rows, piece

    monkeypatch.setattr(StoredTensor, "chunks", counted)
    monkeypatch.setattr(loading, "aligned_empty", lambda *a: (held.append(np.prod(a[0])), empty(*a))[1])
    _, params = load_model(path, placement=place_on(4))
    layer = params.layers[1]
    for name, found, axis in (
        ("model.layers.1.self_attn.q_proj.weight", layer.w_q, 0),
        ("model.layers.1.self_attn.o_proj.weight", layer.w_o, 1),
        ("model.layers.1.mlp.up_proj.weight", layer.w_up, 0),
        ("model.layers.1.mlp.down_proj.weight", layer.w_down, 1),
    ):
        parts = np.split(tensors[name], 4, axis)
        for part, mine in zip(parts, on_devices(found), strict=True):
            np.testing.assert_array_equal(mine, part)
        assert [size for tensor, size in read if tensor == name] == [part.size for part in parts]
    k = np.split(tensors["model.layers.1.self_attn.k_proj.weight"], 2)
    for device, mine in enumerate(on_devices(layer.w_k)):
        np.testing.assert_array_equal(mine, k[device // 2])
    head = tensors["lm_head.weight"]
    for device, mine in enumerate(on_devices(params.head)):
        assert mine.shape == (128, ON_DISK.d_model)
        rows = head[128 * device : 128 * (device + 1)]
        np.testing.assert_array_equal(mine[: len(rows)], rows)
        assert not mine[len(rows) :].any()
    # One part of one tensor at a time is in the host's memory.
    assert max(held) == max(shard.data.size for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)


@pytest.mark.soak
def test_a_checkpoint_gives_the_same_tokens(tmp_path):
    path = write_model(tmp_path, random_tensors(ON_DISK), ON_DISK)
    settings = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_blocks": 4}
    settings |= {"operators": {"linear": "xla", "attention": "xla"}, "dtype": "f32"}
    params = dataclasses.replace(GREEDY, max_tokens=4)
    prompt = {"prompt_token_ids": [5, 7, 11]}
    texts = [LLM(path, tensor_parallel_size=n, **settings).generate(prompt, params)[0].outputs[0] for n in (1, 4)]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.soak
@pytest.mark.parametrize(("name", "num_devices"), [("GQA", 2), ("MQA", 8), ("MLA", 4)])
def test_memory_of_each_device_is_planned(name, num_devices):
    model, llm = MODELS[name], make_llm(name, num_devices)
    shape = StepShape((TileGroup(16, 1), TileGroup(2, 16)), 8, 16)
    measured = program_bytes(llm.runner.compile_step(shape))
    settings = {
        "block_size": llm.config.block_size,
        "max_model_len": 128,
        "settings": OperatorSettings(attention="xla", linear="xla"),
    }
    [planned] = step_bytes(local_model(model, num_devices), [shape], dtype="f32", **settings)
    # A step is planned as one of a smaller model: sums over devices are in what is measured alone.
    assert planned.network <= 1.02 * measured and measured <= 1.3 * planned.network
    found = llm.memory_usage()
    for part in ("weights", "pool"):
        assert found[part].predicted == found[part].measured > 0
    shared = max(num_devices // model.num_kv_heads, 1)
    assert found["pool"].measured * num_devices == llm.num_blocks * llm.block_bytes * shared


def test_a_block_on_the_host_has_each_kv_head_once():
    one, several = (make_llm("GQA", n, host_cache_bytes=2**16) for n in (1, 4))
    rng = np.random.default_rng(1)
    values = rng.standard_normal(one.runner.cache.kv.shape, np.float32)
    for llm, repeats in ((one, 1), (several, 2)):
        runner = llm.runner
        kv = jax.device_put(values.repeat(repeats, axis=3), runner.placement.by_head())
        runner.cache = runner.cache.with_kv(kv)
        pairs = np.array([[3, 0], [5, 2]], np.int32)
        none = np.zeros((0, 2), np.int32)
        runner.move(Moves(pairs, none, none))
    np.testing.assert_array_equal(one.runner.host_blocks, several.runner.host_blocks)
    assert one.runner.host_blocks.any()
    back = np.array([[2, 9]], np.int32)
    several.runner.move(Moves(none, none, back))
    np.testing.assert_array_equal(several.runner.cache.kv[9], several.runner.cache.kv[5])


@pytest.mark.soak
def test_weights_have_the_same_fingerprint_on_any_number_of_devices():
    for name in MODELS:
        llms = [make_llm(name, n, enable_prefix_caching=True) for n in (1, 2, 4)]
        assert len({llm.engine.memory.index.scope.model for llm in llms}) == 1, name


@pytest.mark.soak
@pytest.mark.parametrize("preempt", ["swap"])
def test_a_small_pool_with_a_host_tier(preempt):
    settings = {"num_blocks": 6, "host_cache_bytes": 2**20, "preempt": preempt, "enable_prefix_caching": True}
    one, several = (make_llm("GQA", n, **settings) for n in (1, 4))
    for _ in range(2):  # the second time from the cache
        assert tokens_of(several) == tokens_of(one)
    assert several.records[-1].num_preemptions > 0


@pytest.mark.soak
def test_a_folder_of_blocks_serves_any_number_of_devices(tmp_path):
    settings = {"block_size": 4, "num_blocks": 128, "host_cache_bytes": 2**20, "enable_prefix_caching": True}
    settings |= {"disk_cache_dir": str(tmp_path), "cache_write": "through"}
    prompts = PROMPTS[3:4]
    texts, cached = [], []
    for n in (4, 1, 8):
        with make_llm("GQA", n, **settings) as llm:
            llm.engine.memory.disk_reads._timeout_s = 60.0
            [output] = llm.generate(prompts, GREEDY)
            texts.append(output.outputs[0].token_ids)
            cached.append(output.num_cached_tokens)
    assert texts[0] == texts[1] == texts[2] and cached == [0, 32, 32]


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (dataclasses.replace(MHA, num_heads=6, num_kv_heads=6), {}, "4: num_heads 6 is not a multiple of it; num_kv"),
        (dataclasses.replace(MHA, d_ff=66), {}, "d_ff 66 is not a multiple of it"),
        (MHA, {"tensor_parallel_size": 16}, "tensor_parallel_size is 16, there are 8 devices .cpu.; .* XLA_FLAGS="),
        (MHA, {"operators": {"linear": "packed"}}, "'packed': computes parts of a layer at once, and 4"),
        (
            MHA,
            {"kv_eviction": {"method": "tova", "budget": 0.5}},
            "tensor_parallel_size 4 does not go with kv_eviction",
        ),
        (
            MODELS["GQA"],
            {"kv_eviction": {"method": "h2o", "budget": 0.5}},
            "4 does not go with kv_eviction H2O: .* on one device",
        ),
        (MHA, {"numerics": "invariant", "operators": {}}, "does not go with numerics"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(model, settings, said):
    settings = {"tensor_parallel_size": 4, "max_model_len": 32, "dtype": "f32", "num_blocks": 4} | settings
    with pytest.raises((ConfigError, ValueError), match=said):
        LLM.from_params(model, params_of("MHA"), **settings)


def test_too_few_threads_are_refused_because_sums_would_wait_for_ever(monkeypatch):
    monkeypatch.setenv("NPROC", "9")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 8, and XLA has 9 threads .* NPROC=16"):
        place_on(8)


@pytest.mark.soak
def test_an_embedding_on_the_host_is_whole_there_and_on_no_device():
    few = {"max_num_batched_tokens": 2, "query_tile": 1, "max_num_seqs": 2, "num_blocks": 16}
    one, on_device, several = (
        make_llm("MHA", n, embedding_device=where, **few) for n, where in ((1, "host"), (4, "device"), (4, "host"))
    )
    texts = [tokens_of(llm, dataclasses.replace(GREEDY, max_tokens=4), PROMPTS[3:5]) for llm in (one, several)]
    assert texts[0] == texts[1]
    embed = several.runner.params.embed
    assert isinstance(embed, np.ndarray) and embed.shape == (MHA.vocab_size, MHA.d_model)
    for llm in (one, on_device, several):
        weights = llm.memory_usage()["weights"]
        assert weights.predicted == weights.measured > 0
    a_quarter = local_model(MHA, 4).vocab_size * MHA.d_model * 4
    assert on_device.memory_usage()["weights"].measured - weights.measured == a_quarter


@pytest.mark.soak
def test_an_embedding_on_the_host_is_read_and_drawn_as_for_one_device(tmp_path):
    path = write_model(tmp_path, random_tensors(ON_DISK), ON_DISK)
    for load_format in ("auto", "dummy"):
        found = []
        for n in (1, 4):
            _, params = load_model(path, load_format=load_format, embedding_device="host", placement=place_on(n))
            assert isinstance(params.embed, np.ndarray)
            found.append(params.embed)
        np.testing.assert_array_equal(*found)
