"""`--prefix-file`: requests with a configured prefix go to its servers, whatever the client's key."""

import asyncio

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router import RouterSettings
from ksana_jax.serve.router.prefix_file import GivenPrefix
from ksana_jax.serve.router.proxy.app import Proxy
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.prefixes import ConfiguredPrefixes
from ksana_jax.serve.router.proxy.running import route
from ksana_jax.serve.router.proxy.settings import ProxySettings
from tests.serve.router.proxy.harness import scene

BLOCKS = RouterSettings(block_size=4)
IDS = tuple(range(100, 112))


async def test_requests_go_to_the_servers_of_their_prefix():
    async with scene(3, policy="prefix_table", router=BLOCKS) as s:
        urls = [fake.url for fake in s.fakes]
        given = [GivenPrefix("line 1", None, IDS, (urls[1],)), GivenPrefix("line 2", "a text " * 9, (), (urls[2],))]
        s.proxy.prefixes = ConfiguredPrefixes(s.fleet.router, given, urls)
        await s.proxy.prefixes.tokenize(s.proxy.reader)  # asks a fake, whose tokens are bytes of the request

        async def asked_of(prompt, **headers):
            before = [len(fake.requests) for fake in s.fakes]
            body = {"model": "fake", "prompt": prompt, "max_tokens": 2}
            async with s.client.post(s.url + "/v1/completions", json=body, headers=headers) as got:
                assert got.status == 200
            return [len(fake.requests) - count for fake, count in zip(s.fakes, before, strict=True)].index(1)

        for number in range(6):
            assert await asked_of([*IDS, number, 1, 2, 3]) == 1
            assert await asked_of([*IDS, 5], Authorization=f"Bearer key{number}") == 1
        assert {await asked_of([number] * 16) for number in range(20)} == {0, 1, 2}
        assert len(s.fleet.router.require_table().table.prefixes) >= 2 * 7  # of each key


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (GivenPrefix("f, line 2", None, (1, 2, 3)), "f, line 2: 3 tokens are no full block of 4"),
        (GivenPrefix("f, line 2", "x", (), ("http://b:2",)), "f, line 2: server http://b:2 is not among --servers"),
        (GivenPrefix("f, line 2", "x", (), ("ftp://b",)), "f, line 2: server is 'ftp://b', must be an address"),
    ],
)
def test_a_line_that_cannot_be_configured_is_one_error_at_the_start(prefix, said):
    fleet = Fleet(ProxySettings(policy="prefix_table"), BLOCKS)
    with pytest.raises(ConfigError, match=said):
        ConfiguredPrefixes(fleet.router, [prefix], ["http://a:1"])


def test_another_policy_refuses_the_file(tmp_path):
    path = tmp_path / "prefixes"
    path.write_text('{"token_ids": [1]}')
    with pytest.raises(ConfigError, match="for policy prefix_table, not MinTTFT"):
        asyncio.run(route(ProxySettings(port=0, prefix_file=path), BLOCKS, ["http://127.0.0.1:9"]))


async def test_a_text_without_a_full_block_is_skipped_with_a_warning(caplog):
    async with scene(1, policy="prefix_table", router=RouterSettings(block_size=4096)) as s:
        made = ConfiguredPrefixes(s.fleet.router, [GivenPrefix("f, line 1", "short", ())], [])
        await made.tokenize(Proxy(s.fleet).reader)
        made.see("", "", 0.0)
        assert not s.fleet.router.require_table().table.prefixes and "no full block of 4096" in caplog.text
