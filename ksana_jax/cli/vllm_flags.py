"""Flags of `vllm serve` as settings of `ksana serve`: --max-model-len 512 is max_model_len=512. No jax.

Flags of the engine are the keywords of `vllm_names`, with dashes; the server's are below.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.vllm_names import LLM, NAMES, Name, read_table, refuse_unless_neutral

SERVE = "ksana serve"
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
# Like vllm_names.MISSING.
_SERVER = """
requests are not logged; --verbose shows what the engine does
    disable_log_requests = True, False | True
    enable_log_requests = False | True
    uvicorn_log_level = any | "info"
    disable_uvicorn_access_log = True, False | True
every answer has the header x-request-id
    enable_request_id_headers = True, False | True
one process serves; `ksana route --spawn 4 MODEL` starts several and divides requests among them
    api_server_count = "1" | "1"; "4"
    disable_frontend_multiprocessing = True, False | True
the chat template shows tools to the model; calls in an answer stay text
    enable_auto_tool_choice = False | True
    tool_call_parser = None | "hermes"
    reasoning_parser = None | "qwen3"
text only: parts of a content are joined by line breaks
    chat_template_content_format = "auto", "string" | "auto"; "openai"
no TLS: put a proxy in front that ends it
    ssl_keyfile = None | "key.pem"
    ssl_certfile = None | "cert.pem"
paths are fixed: a proxy in front can add a prefix
    root_path = "" | "/api"
"""
SERVER = {entry.name: entry for entry in read_table(SERVE, _SERVER)}
_ENGINE = {entry.name: entry for entry in NAMES if entry.where == LLM}
_CONFIG = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
_MODEL = ("tokenizer", "load_format", "revision")
# Numbers that vLLM also takes as 32K or 1.5m.
_SIZES = ("max_model_len", "max_num_batched_tokens")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def as_settings(arguments: Sequence[str], own: Collection[str]) -> Iterator[str]:
    """Yields arguments with flags of vLLM as settings, name=value, or left out where they have no effect.

    Args:
      own: options of the command itself, which stay, as do unknown flags.

    Raises:
      ConfigError: a flag lacks its value, or asks for something unsupported.
    """
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        flag = _SHORT.get(flag, flag)
        name = flag.removeprefix("--").replace("-", "_")
        if not _known(name) and _known(name.removeprefix("no_")):
            name, equals, value = name.removeprefix("no_"), "=", "false"
        if not flag.startswith("--") or flag in own or not _known(name):
            yield argument
            continue
        if not equals and _is_switch(name):
            value = "true"
        elif not equals and (value := next(rest, None)) is None:
            raise ConfigError(f"{flag} needs a value, such as {flag}=VALUE")
        if name in _SIZES:
            value = _plain(value)
        if name in SERVER:
            refuse_unless_neutral(SERVER[name], {"true": True, "false": False}.get(value, value))
        else:
            yield f"{name}={value}"


def _plain(size: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", size)
    return size if found is None else str(int(float(found[1]) * _UNITS[found[2]]))


def _known(name: str) -> bool:
    first = name.partition(".")[0]  # --speculative-config.method ngram
    return name in SERVER or any(first in names for names in (_ENGINE, _CONFIG, _MODEL))


def _is_switch(name: str) -> bool:
    entry: Name | None = _ENGINE.get(name) or SERVER.get(name)
    if entry is None:
        return isinstance(_CONFIG.get(name), bool)
    switches = [value for value in entry.neutral if isinstance(value, bool)]
    return bool(switches) and (True in switches or None not in entry.neutral)
