"""Third-party clients against the server: openai-python, and requests of lm-evaluation-harness, vLLM's benchmark and
guidellm as their sources write them. Scores equal `LLM.generate`'s."""

import asyncio

import openai
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.engine.async_llm import AsyncLLM
from tests.serve.server.serving import TEMPLATE, serving

PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    llm = LLM("ksana-tiny", max_num_seqs=4, num_blocks=128, enable_prefix_caching=True)
    llm.get_tokenizer().chat_template = TEMPLATE
    return llm


@pytest.fixture(scope="module")
def tiny(llm):
    with serving(AsyncLLM.around(llm), api_keys=("key",), served_model_names=("tiny", "ksana-tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_openai_lists_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "ksana-tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 256


def test_openai_completes(client, llm):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    [expected] = llm.generate(PROMPT, GREEDY)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage.completion_tokens == 12 and answer.system_fingerprint.startswith("fp_")


def test_openai_streams_a_chat(client):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = [*client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_openai_reads_log_probabilities(client, llm):
    [expected] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5, logprobs=3))
    [one] = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3).choices
    found = expected.outputs[0].logprobs
    ids = expected.outputs[0].token_ids
    assert one.logprobs.token_logprobs == [of[token].logprob for token, of in zip(ids, found, strict=True)]
    for top, of in zip(one.logprobs.top_logprobs, found, strict=True):
        assert sorted(top.values()) == sorted(logprob.logprob for logprob in of.values())


def test_openai_raises_its_exceptions(client, tiny):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, n=65)
    assert (caught.value.param, caught.value.status_code) == ("n", 400) and caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()


def test_openai_aborts_a_stream(client, tiny):
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert tiny.settled()


def test_openai_async_streams_at_once(tiny, llm):
    prompts = ["Once", "upon", "a time", "def main("]
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]

    async def read(client, prompt):
        fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        stream = await client.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        url = f"http://127.0.0.1:{tiny.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            return await asyncio.gather(*(read(client, prompt) for prompt in prompts))

    assert asyncio.run(main()) == expected


def test_openai_async_aborts_when_its_task_is_cancelled(tiny):
    async def main():
        url = f"http://127.0.0.1:{tiny.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            asked = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=240, extra_body={"ignore_eos": True}
            )
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.05)

    asyncio.run(main())
    assert tiny.settled()


def test_log_likelihoods_as_lm_eval_asks_are_those_offline(tiny, llm):
    """lm_eval's local-completions: lists of token ids, echo, logprobs 1, max_tokens 1, temperature 0, a seed."""
    tokenizer = llm.get_tokenizer()
    texts = [("Once upon", " a time"), ("def main(", "self):"), ("import ", "numpy as np")]
    pairs = [(tokenizer.encode(context), tokenizer.encode(rest, False)) for context, rest in texts]
    body = {"model": "tiny", "prompt": [a + b for a, b in pairs], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    reply = tiny.ask("POST", "/v1/completions", {**body, "seed": 1234, "echo": True}, authorization="Bearer key")
    outputs = llm.generate([a + b for a, b in pairs], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    choices = sorted(reply.json["choices"], key=lambda choice: choice["index"])
    for (context, rest), choice, output in zip(pairs, choices, outputs, strict=True):
        logprobs = choice["logprobs"]
        tokens = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        offline = output.prompt_logprobs[len(context) :]
        assert tokens == [found[token].logprob for token, found in zip(rest, offline, strict=True)]
        is_greedy = [own == max(top.values()) for own, top in zip(tokens, tops, strict=True)]
        assert is_greedy == [found[token].rank == 1 for token, found in zip(rest, offline, strict=True)]


def test_lm_eval_finds_the_tokenizer(tiny, llm):
    info = tiny.ask("GET", "/tokenizer_info", authorization="Bearer key").json
    assert info["eos_token"] == "</s>"
    reply = tiny.ask("POST", "/tokenize", {"prompt": PROMPT, "add_special_tokens": False}, authorization="Bearer key")
    assert reply.json["tokens"] == llm.get_tokenizer().encode(PROMPT, add_special_tokens=False)


REQUESTS = {
    "vllm bench serve, completions": (
        "/v1/completions",
        {"prompt": PROMPT, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
        | {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    "vllm bench serve, chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 8}
        | {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    "guidellm": (
        "/v1/completions",
        {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        | {"max_tokens": 8, "stop": None, "ignore_eos": True, "temperature": 0},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_load_generators_are_served(tiny, name):
    path, body = REQUESTS[name][0], dict(REQUESTS[name][1])
    reply = tiny.ask("POST", path, {"model": "tiny", **body}, authorization="Bearer key", x_request_id="bench-1")
    assert (reply.status, reply.headers["x-request-id"]) == (200, "bench-1"), reply.body
    *chunks, last = reply.events
    assert all(chunk["choices"] for chunk in chunks) and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    del body["stream_options"]
    whole = tiny.ask("POST", path, {"model": "tiny", **body, "stream": False}, authorization="Bearer key").json
    assert text and text in (whole["choices"][0].get("text"), whole["choices"][0].get("message", {}).get("content"))
