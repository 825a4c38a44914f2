"""What each device has of a model, in numbers; no devices needed."""

import dataclasses

import jax
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.kv.state_layout import state_layout
from ksana_jax.models.params import heads_of, init_params, is_shape, param_shapes
from ksana_jax.runner.planner import plan
from ksana_jax.runner.planner.step_memory import NO_STEP
from ksana_jax.sharding.shares import local_layout, local_model, local_vocabulary, pool_layout, share
from ksana_jax.sharding.specs import field_of, layer_of, specs_of

LLAMA_8B = ModelConfig(
    vocab_size=128_256, d_model=4096, num_layers=2, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336
)


def parts(model: ModelConfig, num_devices: int):
    """Path, whole shape, shape of a part, and shares of all devices, of each weight."""
    whole, _ = jax.tree_util.tree_flatten_with_path(param_shapes(model), is_leaf=is_shape)
    local = jax.tree.leaves(param_shapes(local_model(model, num_devices)), is_leaf=is_shape)
    for (path, shape), part in zip(whole, local, strict=True):
        field = field_of(path)
        heads = heads_of(field, layer_of(path, model))
        yield field, shape, part, [share(field, shape, d, num_devices, heads) for d in range(num_devices)]


@pytest.mark.parametrize("qk_norm", ["head", "projection"])
@pytest.mark.parametrize("num_devices", [2, 8, 16, 32])
def test_shares_have_the_shapes_of_the_local_model_and_cover_each_weight(num_devices, qk_norm):
    flags = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
    dense = dataclasses.replace(LLAMA_8B, sinks="learned", qk_norm=qk_norm, norm_placement="both", **flags)
    of_experts = {"mlp": "swiglu_experts", "experts": ExpertsSpec(4, 2, shared_d_ff=64)}
    model = dense if qk_norm == "head" else dataclasses.replace(dense, mlp_bias=False, **of_experts)
    for field, shape, part, shares in parts(model, num_devices):
        stack = shape[:1] if field.endswith("_experts") else ()
        shape, part = shape[len(stack) :], part[len(stack) :]
        seen = np.zeros(shape[0], int)
        for rows, columns, padding, stacked in shares:
            numbers = np.zeros(shape, np.int8)[rows]
            numbers = numbers[:, columns] if len(shape) == 2 else numbers
            assert (len(numbers) + padding, *numbers.shape[1:]) == part, field
            assert stacked == bool(stack)
            seen[rows] += 1
        assert seen.min() == seen.max() >= 1, field


def test_a_vocabulary_is_divided_by_groups_of_128():
    assert (
        local_vocabulary(128_256, 8) == 16_128 and local_vocabulary(300, 8) == 128 and local_vocabulary(300, 1) == 300
    )


@pytest.mark.parametrize(("num_devices", "of_each", "in_all"), [(2, 4, 8), (8, 1, 8), (16, 1, 16)])
def test_a_pool_is_divided_by_kv_head_and_repeats_heads_for_more_devices(num_devices, of_each, in_all):
    for dtype in ("bf16", "int8", "kivi4"):
        layout = layout_of(LLAMA_8B, dtype=dtype, block_size=16)
        local, pool = local_layout(layout, num_devices), pool_layout(layout, num_devices)
        assert (layout.num_kv_heads, local.num_kv_heads, pool.num_kv_heads) == (8, of_each, in_all)
        assert local.block_bytes * 8 == layout.block_bytes * of_each
        of_model = layout_of(local_model(LLAMA_8B, num_devices), dtype=dtype, block_size=16)
        assert of_model == local


def test_every_weight_has_a_spec():
    params = jax.eval_shape(lambda: init_params(LLAMA_8B))
    specs = specs_of(params)
    layer = specs.layers[0]
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    assert layer.w_q == layer.w_up == specs.embed == jax.P("tensor")
    assert layer.w_o == layer.w_down == jax.P(None, "tensor") and layer.mlp_norm == specs.final_norm == jax.P()


@pytest.mark.parametrize(
    ("num_devices", "said"),
    [
        (3, "num_heads 32 is not a multiple of it; d_ff 14336 is not a multiple of it; num_kv_heads 8 is neither"),
        (64, "tensor_parallel_size is 64: num_heads 32 is not a multiple of it"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_all_reasons(num_devices, said):
    with pytest.raises(ConfigError, match=said):
        local_model(LLAMA_8B, num_devices)


def test_a_plan_is_one_of_each_device():
    one, several = (plan(LLAMA_8B, "h200", step=NO_STEP, batch=8, tensor_parallel_size=n) for n in (1, 8))
    assert several.num_params == one.num_params
    assert several.kv_bytes_per_token * 8 == one.kv_bytes_per_token and several.max_kv_tokens > 8 * one.max_kv_tokens
    norms = (2 * LLAMA_8B.num_layers + 1) * LLAMA_8B.d_model
    padding = 2 * (8 * local_vocabulary(LLAMA_8B.vocab_size, 8) - LLAMA_8B.vocab_size) * LLAMA_8B.d_model
    assert several.weights_bytes * 8 == one.weights_bytes + 2 * (7 * norms + padding)  # bfloat16
    assert [change.name for change in one.changes] == [change.name for change in several.changes]
    host = next(change for change in several.changes if change.name == "embedding on the host")
    assert host.max_kv_tokens > several.max_kv_tokens


@pytest.mark.parametrize("num_devices", [2, 8])
def test_states_are_divided_by_head_and_planned_on_each_device(num_devices):
    model = dataclasses.replace(LLAMA_8B, recurrent=DeltaRuleSpec((0,), 16, 32, 128, 128))
    one, several = (plan(model, "h200", step=NO_STEP, tensor_parallel_size=n) for n in (1, num_devices))
    assert several.state_bytes_per_request * num_devices == one.state_bytes_per_request > 0
    for keys in (16, 4, 1):
        of_keys = dataclasses.replace(model, recurrent=Mamba2Spec((0,), keys, 32, 128, 128))
        if 1 < keys < num_devices:
            of_keys = dataclasses.replace(model, recurrent=DeltaRuleSpec((0,), keys, 32, 128, 128))
        whole, local = (state_layout(m, "float32", 3) for m in (of_keys, local_model(of_keys, num_devices)))
        assert whole is not None and local is not None
        assert whole.of_devices(num_devices, each=True).leaves == local.leaves
        conv = whole.places(num_devices)["conv"]
        assert {*conv.tolist()} == {*range(whole.leaves[0].shape[-1])}
        assert len(conv) == num_devices * local.leaves[0].shape[-1]


def test_a_plan_refuses_what_an_engine_would():
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not go with kv_eviction TOVA"):
        plan(LLAMA_8B, "h200", step=NO_STEP, tensor_parallel_size=2, kv_eviction={"method": "tova", "budget": 0.5})
