"""Servers of several models: a request goes to one that has its model, and prefixes of models are told apart."""

import asyncio

from ksana_jax.serve.router.proxy.models import SameModel
from tests.serve.router.proxy.harness import scene


async def test_a_request_goes_to_a_server_of_its_model():
    async with scene(2) as s:
        both, one = s.fakes
        both.model, one.model = "a b", "a"
        await SameModel(s.proxy).check()
        for model, some in (("a", {both, one}), ("b", {both}), ("none", {both, one})):
            asked = asyncio.gather(*(s.ask(f"{model} {n}", model=model) for n in range(12)))
            assert {status for status, _ in await asked} == {200}
            assert {fake for fake in s.fakes if fake.requests} <= some
            assert all(fake.requests for fake in some) or model == "none"
            for fake in s.fakes:
                fake.requests.clear()
        both.tokenizes = one.tokenizes = 200
        before = one.num_tokenized
        for _ in range(8):
            async with s.client.post(f"{s.url}/tokenize", json={"model": "b", "prompt": "x"}) as got:
                assert got.status == 200
        assert one.num_tokenized == before
        await s.get("/tokenizer_info?model=b")
        assert both.got[-1] == "/tokenizer_info?model=b"


async def test_prefixes_of_two_models_are_told_apart_and_names_of_one_are_not():
    async with scene(1) as s:
        for names, root, differ in (("a b", "", True), ("a b", "a", False)):
            s.fakes[0].model, s.fakes[0].root = names, root
            await SameModel(s.proxy).check()
            assert await s.proxy.served_models() == ({"a"} if root else {"a", "b"})
            bodies = [b'{"model": "%s", "prompt": [%s]}' % (name, b"1," * 63 + b"1") for name in (b"a", b"b")]
            read = [await s.proxy.reader.read("/v1/completions", body, "") for body in bodies]
            assert [prompt.model for prompt in read] == ["a", "b"] and len(read[0].hashes) == 4
            assert (read[0].hashes != read[1].hashes) is differ
