"""Requests whose blocks of 100 tokens are named by letters, for routers of tests that prefill 1,000 tokens/s."""

from typing import Any

from ksana_jax.serve.router import RoutedRequest, Router, RouterSettings

SETTINGS = RouterSettings(block_size=100, prefill_tokens_per_s=1000, decode_row_s=0.001)


def request(name, num_prompt=1000, text="", client=""):
    """A prompt whose blocks are named by the letters of `text`, then by its own name."""
    letters = [*text, *(f"{name}/{n}" for n in range(num_prompt // 100 - len(text)))]
    hashes, chain = [], ""
    for letter in letters:
        chain += letter
        hashes.append(chain.encode())
    return RoutedRequest(str(name), num_prompt, hashes, client=client)


def router(policy: Any = "min_ttft", servers="abc", seed=0, **settings):
    return Router(servers, policy, SETTINGS if not settings else RouterSettings(**settings), seed)


def cache(r, server, text, name="warm", now=0.0):
    """Has a server cache a prompt, and be idle again."""
    assert r.choose(request(name, 100 * len(text), text), now, exclude=set(r.servers) - {server}) == server
    r.finished(name, now)
