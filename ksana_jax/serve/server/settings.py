"""Settings of HTTP servers. Knows no engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError, system_reason
from ksana_jax.core.lora import LoRARequest
from ksana_jax.serve.server.tool_parsers.registry import PARSERS

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclasses.dataclass(frozen=True)
class HTTPSettings:
    """Settings that servers of a model and the proxy before them share.

    Args:
      host: address to listen on; 0.0.0.0 for all of this machine.
      port: port to listen on; 0 takes a free one.
      allowed_hosts: names by which clients may ask a server that has no keys and listens on this machine alone; empty
        takes localhost and addresses, which are always allowed.
      api_keys: a client must send one of these, as `Authorization: Bearer KEY`; without any, everyone is served.
      shutdown_timeout_s: seconds for running requests to finish after SIGTERM.
      client_timeout_s: seconds after which a client that does not read its answer, or does not finish sending its
        request, is disconnected.
      max_body_bytes: maximum bytes of a request's body.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    shutdown_timeout_s: float = 30.0
    client_timeout_s: float = 60.0
    max_body_bytes: int = 8 * 2**20

    def __post_init__(self):
        checks.require(
            None if self.host else "host is '', must be an address to listen on; 0.0.0.0 is all of this machine",
            checks.integer("port", self.port, 0, 65535),
            checks.number("shutdown_timeout_s", self.shutdown_timeout_s, 0, 86400),
            checks.number("client_timeout_s", self.client_timeout_s, above=0, high=86400),
            checks.integer("max_body_bytes", self.max_body_bytes, 1024),
            error=ConfigError,
        )


@dataclasses.dataclass(frozen=True)
class ServerSettings(HTTPSettings):
    """Configures the HTTP server of a model.

    Args:
      allowed_origins: origins of web pages that may ask (CORS), such as https://chat.example, or * for all; empty takes
        the server's own.
      served_model_names: names that clients may use for the model; answers carry the first; empty takes the
        name under which it was loaded.
      lora_modules: adapters of the model, each served as a model with its own name; the engine has `enable_lora`.
      max_num_queued_reqs: completions that may wait or run at once, more are told 429; None takes four times
        max_num_seqs, at least 1024.
      max_num_queued_tokens: prompt tokens that may wait to be computed; None takes 600 seconds of prefill.
      kv_cache_metrics: measure how long cached blocks live, lie idle and wait for reuse, for /metrics.
      kv_cache_metrics_sample: share of the blocks that are measured with kv_cache_metrics, above 0 and at most 1.
      ping_s: seconds without an event after which a stream carries a comment, which keeps proxies from closing it.
      max_header_bytes: maximum bytes of a request's first line and headers.
      session_dir: folder for sessions that POST /sessions/NAME/save and /restore save and restore; None takes no such
        requests.
      sleep_after: seconds without a request after which the model sleeps; the next request wakes it up; None means
        never.
      sleep_level: of that sleep: 1 keeps the weights in host memory, 2 reads them again.
      device_memory_bytes: most bytes that the weights and pools of several models take on the device; idle ones sleep
        when another is asked for; None means no limit.
      tool_call_parser: how the model writes tool calls, such as hermes; None takes its chat template's way.
      admin_keys: requests to /sessions, and to load and unload adapters, must send one of these.
    """

    allowed_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    lora_modules: tuple[LoRARequest, ...] = ()
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    ping_s: float = 15.0
    max_header_bytes: int = 64 * 2**10
    session_dir: str | None = None
    sleep_after: float | None = None
    sleep_level: int = 1
    device_memory_bytes: int | None = None
    tool_call_parser: str | None = None
    admin_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.integer("max_num_queued_reqs", self.max_num_queued_reqs, 1, 2**31 - 1, optional=True),
            checks.integer("max_num_queued_tokens", self.max_num_queued_tokens, 1, 2**31 - 1, optional=True),
            checks.boolean("kv_cache_metrics", self.kv_cache_metrics),
            checks.number("kv_cache_metrics_sample", self.kv_cache_metrics_sample, above=0, high=1),
            checks.number("ping_s", self.ping_s, above=0, high=86400),
            checks.integer("max_header_bytes", self.max_header_bytes, 1024),
            checks.number("sleep_after", self.sleep_after, above=0, high=2**31, optional=True),
            checks.integer("sleep_level", self.sleep_level, 1, 2),
            checks.integer("device_memory_bytes", self.device_memory_bytes, 1, 2**63 - 1, optional=True),
            error=ConfigError,
        )
        if self.tool_call_parser not in (None, *PARSERS):
            raise ConfigError(f"tool_call_parser is {self.tool_call_parser!r:.60}, must be one of {', '.join(PARSERS)}")
        if self.session_dir is not None and not self.admin_keys:
            raise ConfigError(f"session_dir is {self.session_dir!r} and needs admin_keys: any client could use it")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins has {origin!r:.80}, must be * or as https://chat.example:8443")
        names = [*self.served_model_names, *(adapter.lora_name for adapter in self.lora_modules)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"served_model_name and lora_modules have {twice!r:.60} twice")
        for name in names:
            if not (name and name.isprintable() and len(name) <= 256):
                raise ConfigError(f"served_model_name is {name!r:.60}, must be 1 to 256 printable characters")

    @property
    def block_sample(self) -> float:
        """Share of the cached blocks whose times are measured; 0 for none."""
        return self.kv_cache_metrics_sample if self.kv_cache_metrics else 0.0


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Reads a file of API keys, one a line; empty lines and lines that begin with # are skipped.

    Raises:
      ConfigError: it cannot be read, has no key, or one that cannot be sent in a header.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"API keys cannot be read from {path}: {system_reason(error)}") from None
    return api_keys_of(text, str(path))


def api_keys_of(text: str, source: str) -> tuple[str, ...]:
    """Returns the keys of a text as `read_api_keys` does; source: for errors."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (key := line.strip()) or key.startswith("#"):
            continue
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{source}: the key in line {number} must be printable ASCII without spaces")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} has no API key: write one a line")
    return tuple(keys)


def read_lora_modules(modules: Sequence[str]) -> tuple[LoRARequest, ...]:
    """Reads adapters written as NAME=PATH.

    Raises:
      ConfigError: one is written otherwise.
    """
    found = []
    for number, module in enumerate(modules, 1):
        name, _, path = module.partition("=")
        if not (name and path):
            raise ConfigError(f"--lora-modules is {module!r:.80}, must be NAME=PATH")
        found.append(LoRARequest(name, number, path))
    return tuple(found)
