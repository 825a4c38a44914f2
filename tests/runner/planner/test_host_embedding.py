"""The token embedding in host memory: the same tokens, and fewer bytes on the device."""

import dataclasses

import jax
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.loading.load import embedding_on_host
from ksana_jax.models.params import init_params
from ksana_jax.runner.step_runs import compiled_programs
from tests.engine.small import SMALL, Letters, make_llm, model
from tests.loading.models_on_disk import TINY, random_tensors, write_model
from tests.soak import soak_unless

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def device_bytes(llm):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.params) if isinstance(leaf, jax.Array))


@pytest.mark.parametrize("dtype", soak_unless(lambda dtype: dtype == "bf16", ["f32", "bf16"]))
def test_tokens_are_the_same_and_the_device_is_freed_of_its_bytes(tmp_path, dtype):
    folder = write_model(tmp_path / "m", random_tensors(TINY))
    settings = {
        "dtype": dtype,
        "num_blocks": 4,
        "max_num_seqs": 1,
        "query_tile": 16,
        "max_num_batched_tokens": 16,
        "max_model_len": 16,
    }
    llm = {where: LLM(folder, embedding_device=where, **settings) for where in ("device", "host")}
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 5, 9, 31, 0, 7], [2, 8, 3])]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    on_device, on_host = ([o.outputs[0].token_ids for o in one.generate(prompts, params)] for one in llm.values())
    assert on_host == on_device and len(on_host[0]) == 8
    embed = llm["host"].runner.params.embed
    assert isinstance(embed, np.ndarray)
    freed = TINY.vocab_size * TINY.d_model * (4 if dtype == "f32" else 2)
    assert device_bytes(llm["device"]) - device_bytes(llm["host"]) == freed == embed.nbytes
    for one in llm.values():
        assert one.memory_plan.weights_bytes == device_bytes(one)


def test_no_program_takes_the_embedding_to_the_device():
    llm = {where: make_llm(Letters(), embedding_device=where, programs={}) for where in ("device", "host")}
    config, _ = model()
    for one in llm.values():
        one.warm_up(sampling_params=GREEDY)
    shapes = [key for key in llm["device"].runner.programs if not isinstance(key[0], str)]
    for shape in shapes:
        on_device, on_host = (
            sum(p.memory_analysis().argument_size_in_bytes for p in compiled_programs(one.runner.programs[shape]))
            for one in llm.values()
        )
        # Rows of the embedding [T, D] come in the place of ids [T] and of the tokens [J] that the step before samples.
        rows = 4 * (shape.num_tokens * config.d_model - shape.num_tokens - shape.max_sampled)
        assert on_device - on_host == config.vocab_size * config.d_model * 4 - rows


def test_a_tied_embedding_is_refused_in_one_line():
    config = dataclasses.replace(model()[0], tie_embeddings=True)
    with pytest.raises(ConfigError) as raised:
        LLM.from_params(config, init_params(config), **SMALL, embedding_device="host")
    assert str(raised.value) == (
        "embedding_device is 'host', but this model's embedding is its output head too (tied), "
        "which the device needs: nothing would be freed"
    )
    with pytest.raises(ConfigError, match="output head too"):
        LLM("ksana-tiny", embedding_device="host")


def test_the_embedding_on_the_host_holds_the_same_numbers():
    _, params = model()
    assert np.array_equal(embedding_on_host(params).embed, np.asarray(params.embed))
