"""Flags of `vllm serve` as settings of `ksana serve`: --max-model-len 512 is max_model_len=512. No jax.

Flags of the engine are the keywords of `vllm_names`, with dashes; those of the server are below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from ksana_jax import vllm_names
from ksana_jax.config import EngineConfig
from ksana_jax.errors import ConfigError
from ksana_jax.vllm_names import LLM, NAMES, Name, read_table, refuse_unless_neutral

SERVE = "ksana serve"
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
# As vllm_names.MISSING.
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
no adapters: merge them into the weights
    lora_modules = None | "sql=/adapters/sql"
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


def as_settings(arguments: Sequence[str], own: Collection[str]) -> Iterator[str]:
    """Yields arguments with flags of vLLM as settings, name=value, or left out where they have no effect.

    Args:
      own: options of the command itself, which stay, as flags do that nobody knows.

    Raises:
      ConfigError: a flag lacks its value, or asks for what is not supported.
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
        if name in SERVER:
            refuse_unless_neutral(SERVER[name], {"true": True, "false": False}.get(value, value))
        else:
            yield f"{name}={value}"


def _known(name: str) -> bool:
    first = name.partition(".")[0]  # --speculative-config.method ngram
    return name in SERVER or any(first in names for names in (_ENGINE, _CONFIG, _MODEL))


def _is_switch(name: str) -> bool:
    entry: Name | None = _ENGINE.get(name) or SERVER.get(name)
    if entry is None:
        return isinstance(_CONFIG.get(name), bool)
    switches = [value for value in entry.neutral if isinstance(value, bool)]
    return bool(switches) and (True in switches or None not in entry.neutral)


_FLAGS = """--max-model-len 512; --max-model-len=512; --dtype bfloat16; --kv-cache-dtype fp8; --max-num-seqs 8;
--max-num-batched-tokens 64; --block-size 16; --enable-prefix-caching; --no-enable-prefix-caching; --seed 1;
--gpu-memory-utilization 0.9; --num-gpu-blocks-override 64; --swap-space 4; --tensor-parallel-size 2; -tp 2;
--pipeline-parallel-size 1; --enforce-eager; --enable-chunked-prefill; --no-trust-remote-code; --load-format dummy;
--tokenizer ksana-tiny; --speculative-config.method ngram"""


def page() -> str:
    """Returns docs/coming-from-vllm.md."""
    lines = [
        vllm_names.page(),
        "## vllm serve",
        "",
        "`ksana serve MODEL` takes the keywords of `LLM` above as flags, as `vllm serve` does. `--host`, `--port`,",
        "`--api-key`, `--served-model-name` and `--chat-template` are its own options.",
        "",
        "| vLLM | here | |",
        "|---|---|---|",
    ]
    for flag in _FLAGS.split(";"):
        [setting] = as_settings(flag.split(), ())
        lines.append(f"| `{flag.strip()}` | `{setting}` | |")
    for entry in SERVER.values():
        for text in entry.examples:
            flag = f"--{entry.name.replace('_', '-')}" + ("" if text == "True" else f" {text[1:-1]}")
            try:
                what = "".join(as_settings(flag.split(), ())) or "no effect"
            except ConfigError:
                what = "refused"
            lines.append(f"| `{flag}` | {what} | {entry.note} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
