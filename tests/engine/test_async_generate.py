"""`AsyncLLM` gives the same as `LLM.generate`: tokens, texts, scores, stop strings; with a model and a tokenizer."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from ksana_jax import LLM, AsyncLLM, SamplingParams
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import FinishReason
from ksana_jax.engine.output_buffer import joined
from tests.engine.small import Letters, assert_idle, complete, make_llm

PROMPTS = ["x.y", "the cat", "in the end", "a", "1234"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(Letters())


def both(llm: LLM, prompts: list, params: SamplingParams) -> tuple[list[RequestOutput], list[list[RequestOutput]]]:
    """Results of `LLM.generate` for prompts, and the deltas of as many streams at once."""
    expected = llm.generate(prompts, params)

    async def main() -> list[list[RequestOutput]]:
        async with AsyncLLM.around(llm) as served:

            async def read(prompt):
                return [output async for output in served.generate(prompt, params, delta=True)]

            return await asyncio.gather(*map(read, prompts))

    found = asyncio.run(main())
    assert_idle(llm)
    return expected, found


def assert_equal(expected: RequestOutput, pieces: list[RequestOutput]) -> None:
    found = joined(pieces)
    assert found.finished and found.outputs == expected.outputs
    assert found.prompt_token_ids == expected.prompt_token_ids and found.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, seed=7, n=3, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True, stop=["e", "th"]),
        SamplingParams(beam_width=2, n=2, temperature=0, max_tokens=5),
    ],
    ids=["greedy", "seeded", "n", "scores", "stop", "beams"],
)
def test_streams_give_what_generate_gives(llm, params):
    expected, found = both(llm, PROMPTS, params)
    for one, pieces in zip(expected, found, strict=True):
        assert_equal(one, pieces)


def test_a_text_is_tokenized_in_another_thread_and_arrives_in_outputs(llm):
    seen = []

    class Watched(Letters):
        def _encode(self, text, add_special_tokens):
            seen.append(threading.current_thread().name)
            return super()._encode(text, add_special_tokens)

    async def main():
        async with AsyncLLM.around(llm) as served:
            served.tokenizer = Watched()
            params = SamplingParams(temperature=0, max_tokens=4)
            streams = await served.submit_all(["the cat", {"prompt": "a"}, {"prompt_token_ids": [3, 4]}], params)
            outputs = [await stream.result() for stream in streams]
            assert [output.prompt for output in outputs] == ["the cat", "a", None]
            assert all(name.startswith("ksana-text") for name in seen) and len(seen) == 2

    asyncio.run(main())
    assert_idle(llm)


async def test_a_stop_string_ends_the_stream_and_no_part_of_it_is_let_out(llm):
    whole = complete(llm).text
    stop = whole[9:12]
    async with AsyncLLM.around(llm) as served:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
        pieces = [o async for o in served.generate("x.y", params, delta=True)]
        text = "".join(o.outputs[0].text for o in pieces)
        assert text == whole[: whole.index(stop)]
        assert pieces[-1].outputs[0].finish_reason is FinishReason.STOP
        assert pieces[-1].outputs[0].stop_reason == stop


def test_salts_keep_prefixes_apart():
    llm = make_llm(Letters(), enable_prefix_caching=True)
    prompt, params = {"prompt_token_ids": np.arange(2, 36)}, SamplingParams(temperature=0, max_tokens=2)

    async def main():
        async with AsyncLLM.around(llm) as served:
            cached = []
            for salt in ("a", "a", "b", ""):
                output = await (await served.submit(prompt, params, cache_salt=salt)).result()
                cached.append(output.num_cached_tokens)
            return cached

    assert asyncio.run(main()) == [0, 32, 0, 0]


def test_generate_and_streams_of_threads_share_the_engine(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs for output in llm.generate(PROMPTS, params)]

    async def main():
        async with AsyncLLM.around(llm) as served:
            others = asyncio.get_running_loop().run_in_executor(None, llm.generate, PROMPTS, params)
            streams = await served.submit_all(PROMPTS, params, delta=True)
            assert [(await stream.result()).outputs for stream in streams] == expected
            assert [output.outputs for output in await others] == expected

    asyncio.run(main())
    assert_idle(llm)


def test_the_public_class_loads_a_model_and_closes_it():
    async def main():
        async with AsyncLLM("ksana-tiny", max_num_seqs=2, num_blocks=64, max_model_len=256) as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            text = ""
            async for output in llm.generate("Once upon a time", params, delta=True):
                text += output.outputs[0].text
            assert llm.llm is not None
            return text, llm.llm.generate("Once upon a time", params)[0].outputs[0].text

    text, expected = asyncio.run(main())
    assert text == expected and len(text) > 8
