"""Settings of the proxy. Knows no HTTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.server.settings import HTTPSettings

APPROXIMATE, EXACT = "approximate", "exact"


@dataclasses.dataclass(frozen=True)
class ProxySettings(HTTPSettings):
    """Configures the proxy.

    Args:
      policy: name, or with settings as in YAML: '{name: chwbl, bound: 1.5}'.
      prefix_file: JSON lines of prefixes that the table of policy prefix_table has from the start.
      index: source of the servers' cached blocks: approximate, from sent prompts, or exact, from their events
        (`GET /kv_events`).
      tokenizer: model whose tokenizer reads prompts, a directory or name; None takes the served model's, or asks a
        server where that is not on this machine.
      admin_keys: requests to /servers must send one of these; without any, only this machine may ask, with one of
        `api_keys` where there are any.
      server_api_key: sent to the servers instead of the client's own.
      num_queued: requests that wait here, fairly among keys, while servers are busy, more get 429; 0 sends each on at
        once.
      queue_timeout_s: seconds after which a waiting request is refused, with status 408.
      max_requests_per_server: requests under way on a server at once, beyond which others wait; only with a queue.
      max_retries: other servers that a request is sent to, one after the other, before its error is passed on.
      connect_timeout_s: within which a server must take a connection.
      probe_s: seconds between probes of a server's health.
      probe_timeout_s: within which it must answer.
      max_connections: clients at once; None takes half of ulimit -n, at two descriptors each.
      seed: seed of the policy's random choices.
    """

    policy: Any = "min_ttft"
    prefix_file: Path | None = None
    index: str = APPROXIMATE
    tokenizer: str | None = None
    admin_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    server_api_key: str | None = dataclasses.field(default=None, repr=False)
    num_queued: int = 0
    queue_timeout_s: float = 30.0
    max_requests_per_server: int = 64
    max_retries: int = 2
    connect_timeout_s: float = 2.0
    probe_s: float = 2.0
    probe_timeout_s: float = 2.0
    max_connections: int | None = None
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.one_of("index", self.index, (APPROXIMATE, EXACT)),
            checks.integer("num_queued", self.num_queued, 0),
            checks.number("queue_timeout_s", self.queue_timeout_s, above=0, high=86400),
            checks.integer("max_requests_per_server", self.max_requests_per_server),
            checks.integer("max_retries", self.max_retries, 0, 16),
            checks.number("connect_timeout_s", self.connect_timeout_s, above=0, high=3600),
            checks.number("probe_s", self.probe_s, above=0, high=3600),
            checks.number("probe_timeout_s", self.probe_timeout_s, above=0, high=3600),
            checks.integer("max_connections", self.max_connections, 1, 2**31 - 1, optional=True),
            checks.integer("seed", self.seed, 0),
            error=ConfigError,
        )


def read_server(text: str) -> str:
    """Returns the address of a server in its one form, "http://HOST:PORT".

    Raises:
      ConfigError: it is not an address.
    """
    given = text.strip().rstrip("/")
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigError(f"server is {text!r:.120}, must be an address such as http://127.0.0.1:8001")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
