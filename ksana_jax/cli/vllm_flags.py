"""Flags of `vllm serve` as settings of `ksana serve`: --max-model-len 512 is max_model_len=512. No jax.

Flags of the engine are the keywords of `vllm_names`, with dashes; the server's are below. `page` returns
docs/use/coming-from-vllm.md, which has the fields of requests too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Sequence

from ksana_jax.core import vllm_names
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


_FLAGS = """--max-model-len 512; --max-model-len=512; --max-model-len 32K; --dtype bfloat16;
--kv-cache-dtype fp8; --max-num-seqs 8; --max-num-batched-tokens 25.6k; --block-size 16; --enable-prefix-caching;
--no-enable-prefix-caching; --seed 1; --gpu-memory-utilization 0.9; --num-gpu-blocks-override 64; --swap-space 4;
--tensor-parallel-size 2; -tp 2; --pipeline-parallel-size 1; --enforce-eager; --enable-chunked-prefill;
--no-trust-remote-code; --load-format dummy; --tokenizer ksana-tiny; --speculative-config.method ngram"""


# Fields of requests, as JSON, by endpoint.
_FIELDS = {
    "/v1/completions": """
"n": 2; "temperature": 0.7; "top_p": 0.9; "top_k": 5; "min_p": 0.1; "max_tokens": 16.0; "seed": 1; "stop": ["x"];
"stop_token_ids": [7]; "include_stop_str_in_output": true; "ignore_eos": true; "min_tokens": 1;
"presence_penalty": 0.5; "frequency_penalty": 0.5; "repetition_penalty": 1.2; "logit_bias": {"5": -100};
"allowed_token_ids": [5, 6]; "bad_words": ["no"]; "skip_special_tokens": false; "logprobs": 2; "prompt_logprobs": 2;
"echo": true; "add_special_tokens": false; "truncate_prompt_tokens": 8; "return_token_ids": true; "request_id": "a1";
"cache_salt": "a"; "stream": true; "stream_options": {"include_usage": true}; "user": "a";
"spaces_between_special_tokens": false; "kv_transfer_params": null; "best_of": 1; "best_of": 4;
"use_beam_search": true; "length_penalty": 1.0; "suffix": "a"; "priority": 0; "priority": 1;
"response_format": {"type": "text"}; "response_format": {"type": "json_object"}; "logits_processors": ["f"];
"return_tokens_as_token_ids": true; "vllm_xargs": {"a": 1}
""",
    "/v1/chat/completions": """
"max_completion_tokens": 8; "logprobs": true; "add_generation_prompt": false; "continue_final_message": true;
"chat_template_kwargs": {"enable_thinking": false}; "tools": [{"type": "function", "function": {"name": "add"}}];
"tool_choice": "none"; "tool_choice": "required"; "parallel_tool_calls": true; "echo": false; "echo": true;
"add_special_tokens": true; "documents": [{"text": "a"}]; "chat_template": "{{ messages }}";
"mm_processor_kwargs": {"a": 1}; "reasoning_effort": "low"
""",
}


def _fields(path: str) -> Iterator[tuple[str, str, str]]:
    """Yields a request's fields as rows of `vllm_names.table`."""
    from ksana_jax.serve.server.errors import APIError
    from ksana_jax.serve.server.fields import CHAT, COMPLETIONS
    from ksana_jax.serve.server.schema import Ignored, Only, read_value

    fields = CHAT if "chat" in path else COMPLETIONS
    for text in map(str.strip, _FIELDS[path].split(";")):
        [(name, value)] = json.loads(f"{{{text}}}").items()
        schema, what, why = fields[name].schema if value is not None else None, "the same", ""
        if schema is None or isinstance(schema, (Ignored, Only)):
            what = "no effect"
        if isinstance(schema, Only):
            why = schema.why
            try:
                read_value(name, value, schema)
            except APIError:
                what = "refused"
        yield text, what, why


def _flags() -> Iterator[tuple[str, str, str]]:
    """Yields flags of `vllm serve` as rows of `vllm_names.table`."""
    for flag in map(str.strip, _FLAGS.split(";")):
        [setting] = as_settings(flag.split(), ())
        yield flag, f"`{setting}`", ""
    for entry in SERVER.values():
        for text in entry.examples:
            flag = f"--{entry.name.replace('_', '-')}" + ("" if text == "True" else f" {text[1:-1]}")
            try:
                what = "".join(as_settings(flag.split(), ())) or "no effect"
            except ConfigError:
                what = "refused"
            yield flag, what, entry.note


def page() -> str:
    """Returns docs/use/coming-from-vllm.md."""
    lines = [
        vllm_names.page(),
        "## vllm serve",
        "",
        "`ksana serve MODEL` takes the keywords of `LLM` as flags: `--max-num-seqs 8` is `max_num_seqs=8`. `--host`,",
        "`--port`, `--api-key`, `--served-model-name` and `--chat-template` are its own options.",
        "",
        *vllm_names.table([*_flags()]),
    ]
    for path in _FIELDS:
        lines += [f"## POST {path}", "", *vllm_names.table([*_fields(path)])]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
