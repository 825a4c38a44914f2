"""POST /v1/embeddings with OpenAI's client, and `LLM.embed`: hidden states as the plain forward pass gives them."""

import asyncio
import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from ksana_jax import LLM, AsyncLLM, PoolingParams, SamplingParams, load_model
from ksana_jax.models import dense_attend, forward
from tests.serve.server.serving import serving

TEXTS = ["def main(", "Once upon a time there was a girl who walked in the wood and met a wolf. " * 2, "a"]
PLAIN = PoolingParams(use_activation=False)
MEAN = PoolingParams(pooling_type="MEAN", use_activation=False)
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def llm():
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 256, "num_blocks": 40}
    return LLM("ksana-tiny", **settings, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def served(llm):
    with serving(AsyncLLM.around(llm)) as server:
        yield server


@functools.cache
def hidden_of(ids):
    """Hidden states after the final norm [T, D], of the whole prompt at once; float64 of float32."""
    config, params = load_model("ksana-tiny")
    run = jax.jit(lambda ids: forward(params, ids, dense_attend(params, len(ids), config=config), None, config=config))
    return np.asarray(run(jnp.array(ids))[0], np.float64)


def expected(ids, kind="LAST"):
    """The definition: the last position, or the mean over positions."""
    return hidden_of(tuple(ids))[-1] if kind == "LAST" else hidden_of(tuple(ids)).mean(0)


def test_embeddings_are_hidden_states_whatever_the_chunks_and_the_cache(llm):
    for again in range(2):  # the second time from the prefix cache, which a mean does not use
        for pooling in (PLAIN, MEAN):
            for one in llm.embed(TEXTS, pooling_params=pooling):
                wanted = expected(one.prompt_token_ids, pooling.pooling_type)
                np.testing.assert_allclose(one.outputs.embedding, wanted, rtol=0, atol=1e-4)
                assert again == 0 or len(one.prompt_token_ids) < 99 or (one.num_cached_tokens > 0) == (pooling is PLAIN)
    [unit] = llm.embed(TEXTS[0])
    wanted = expected(unit.prompt_token_ids)
    np.testing.assert_allclose(unit.outputs.embedding, wanted / np.linalg.norm(wanted), rtol=0, atol=1e-6)


def test_embeddings_survive_preemption_and_share_steps_with_other_requests():
    crowded = LLM("ksana-tiny", block_size=8, num_blocks=30, max_num_seqs=4, max_num_batched_tokens=16)
    texts = [text * 2 for text in TEXTS] * 3
    with concurrent.futures.ThreadPoolExecutor() as threads:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        others = threads.submit(crowded.generate, TEXTS, params)
        means, lasts = (crowded.embed(texts, pooling_params=pooling) for pooling in (MEAN, PLAIN))
    assert crowded.engine.scheduler.num_preemptions > 0
    assert [len(one.outputs[0].token_ids) for one in others.result()] == [60] * 3
    for kind, found in (("MEAN", means), ("LAST", lasts)):
        for one in found:
            wanted = expected(one.prompt_token_ids, kind)
            np.testing.assert_allclose(one.outputs.embedding, wanted, rtol=0, atol=1e-4)


def test_openai_client_gets_floats_and_base64(served, llm):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="ksana-tiny", input=TEXTS)  # base64 is this client's default
        plain = client.embeddings.create(model="ksana-tiny", input=TEXTS, encoding_format="float")
        ids = [llm.tokenizer.encode(text) for text in TEXTS]
        of_ids = client.embeddings.create(model="ksana-tiny", input=ids, dimensions=llm.engine.model.d_model)
        one = client.embeddings.create(model="ksana-tiny", input=ids[0], extra_body={"pooling_type": "MEAN"})
    for found in (packed, plain, of_ids):
        assert [entry.index for entry in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        for entry, text in zip(found.data, ids, strict=True):
            wanted = expected(text)
            np.testing.assert_allclose(entry.embedding, wanted / np.linalg.norm(wanted), rtol=0, atol=1e-6)
    wanted = expected(ids[0], "MEAN")
    np.testing.assert_allclose(one.data[0].embedding, wanted / np.linalg.norm(wanted), rtol=0, atol=1e-6)
    assert (one.pooling_type, one.use_activation, plain.pooling_type) == ("MEAN", True, "LAST")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [[]]}, "input", "at least 1"),
        ({"input": 5}, "input", "must be"),
        ({"input": "a", "dimensions": 3}, "dimensions", "dimensions is 3, must be"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling_type": "CLS"}, "pooling_type", "'LAST' or 'MEAN'"),
        ({"input": [99999]}, "input", "input has token id 99999, ids go from 0 to"),
        ({"input": [5] * 256}, "input", "input has 256 tokens, max_model_len is 256"),
        ({"input": "a" * 9999}, "input", "input has 9,999 characters"),
        ({"input": "a", "temperature": 0.5}, "temperature", "unknown field"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(served, fields, field, words):
    answer = served.post(PATH, **fields)
    error = answer.json["error"]
    assert answer.status == 400 and error["param"] == field and words in error["message"], error
    assert "\n" not in error["message"]


def test_no_request_is_lost_under_load(served, llm):
    async def ask(client, number):
        if number % 2:
            found = await client.embeddings.create(model="ksana-tiny", input=TEXTS[number % 3])
            return len(found.data[0].embedding)
        found = await client.completions.create(
            model="ksana-tiny", prompt=TEXTS[number % 3], max_tokens=8, extra_body={"ignore_eos": True}
        )
        return found.usage.completion_tokens

    async def load():
        url = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(40)))

    assert asyncio.run(load()) == [8, llm.engine.model.d_model] * 20
    assert llm.engine.scheduler.blocks.num_used == 0


def test_wrong_parameters_are_refused_before_anything_is_computed(llm):
    with pytest.raises(ValueError, match="pooling_type"):
        PoolingParams(pooling_type="CLS")
    with pytest.raises(ValueError, match="dimensions is 3"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=3))
