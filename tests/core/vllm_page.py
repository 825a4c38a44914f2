"""docs/use/coming-from-vllm.md: vLLM's keywords, flags and fields, and what each is here.

python -m tests.core.vllm_page > docs/use/coming-from-vllm.md
"""

import ast
import json
from collections.abc import Iterator, Sequence

from ksana_jax.cli.vllm_flags import SERVER, as_settings
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.vllm_names import CHAT, GENERATE, LLM, NAMES, SAMPLING, Name, refuse_unless_neutral
from ksana_jax.serve.server.errors import APIError
from ksana_jax.serve.server.request_models import UNSUPPORTED, ChatRequest, CompletionRequest
from ksana_jax.serve.server.validation import validate

# vLLM keywords that are the same here, each with a value for the page and its test.
SAME = {
    LLM: """
dtype="bfloat16"; dtype="float16"; dtype="half"; dtype="float32"; dtype="auto"; kv_cache_dtype="auto";
kv_cache_dtype="bfloat16"; kv_cache_dtype="fp8"; kv_cache_dtype="fp8_e5m2"; max_model_len=128; max_num_seqs=8;
max_num_batched_tokens=64; block_size=16; enable_prefix_caching=True; async_scheduling=True; seed=1;
num_scheduler_steps=8; enable_lora=True; max_loras=4; max_lora_rank=16; max_cpu_loras=8;
device="cpu"; tensor_parallel_size=2; data_parallel_size=1; load_format="dummy";
tokenizer="ksana-tiny"
""",
    GENERATE: """
prompts="a text"; prompts=["a", "b"]; prompts=[5, 6, 7]; prompts=[[5, 6, 7], [8]];
prompts={"prompt_token_ids": [5, 6, 7]}; prompt_token_ids=[[5, 6, 7]]; use_tqdm=True;
sampling_params=SamplingParams(max_tokens=2); sampling_params=[SamplingParams(max_tokens=2)];
lora_request=None
""",
    CHAT: """
use_tqdm=True; chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"; add_generation_prompt=False;
lora_request=None; continue_final_message=True; tools=[{"type": "function", "function": {"name": "add"}}];
chat_template_kwargs={"enable_thinking": False}
""",
    SAMPLING: """
n=2; temperature=0.7; top_k=-1; top_p=0.9; min_p=0.1; repetition_penalty=1.2; presence_penalty=0.5;
frequency_penalty=0.5; seed=1; stop=["x"]; stop_token_ids=[7]; include_stop_str_in_output=True;
ignore_eos=True; min_tokens=1; max_tokens=None;
logprobs=2; prompt_logprobs=2; detokenize=False; skip_special_tokens=False; logit_bias={5: -100};
allowed_token_ids=[5, 6]; bad_words=["no"]
""",
}

_HEAD = """# Coming from vLLM

`LLM`, `SamplingParams`, `RequestOutput` and `CompletionOutput` have vLLM's names and meanings; tests run each example
below. Any other keyword is refused with a one-line error that names the nearest one. Other differences:

- `use_tqdm` is off by default; `use_tqdm=True` draws a progress bar on standard error.
- `dtype` is `"f32"` by default, not `"auto"`. `enable_prefix_caching` is off in `LLM`, on in `ksana serve`.
- `cumulative_logprob` is set whenever `logprobs` is requested, even as `logprobs=0`; otherwise it is None.
- `revision="v1"` and `gguf_file="model-Q4_0.gguf"` can be part of a hub name: `LLM("org/name@v1/model-Q4_0.gguf")`
  ([models.md](models.md)).
- `llm.chat(..., continue_final_message=True)` needs no `add_generation_prompt=False`; `chat_template=` also takes the
  name of one of the model's templates. The template shows `tools` to the model; calls in an answer stay text.
- Beam search is `SamplingParams(beam_width=4)`. `AsyncLLM` stands for `AsyncLLMEngine`; `llm.stream(...)` yields
  outputs as they grow, without an event loop; `delta=True` gives only the new part of each.
- Adapters are told apart by their contents, not by `lora_int_id`; `LoRARequest` is imported from `ksana_jax`, and
  `ksana serve --lora-modules NAME=PATH` sets `enable_lora` and is repeated for each adapter.
"""


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


def page() -> str:
    """Returns the page."""
    lines = [_HEAD]
    for where in (LLM, GENERATE, CHAT, SAMPLING):
        same = [(text.strip(), "the same", "") for text in SAME[where].split(";")]
        others = [_row(entry, text) for entry in NAMES if entry.where == where for text in entry.examples]
        lines += [f"## {where}", "", *table([*same, *others])]
    lines += [
        "## vllm serve",
        "",
        "`ksana serve MODEL` takes the keywords of `LLM` as flags: `--max-num-seqs 8` is `max_num_seqs=8`. `--host`,",
        "`--port`, `--api-key`, `--served-model-name` and `--chat-template` are its own options.",
        "",
        *table([*_flags()]),
    ]
    for path in _FIELDS:
        lines += [f"## POST {path}", "", *table([*_fields(path)])]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Returns rows of (vLLM's code, its equivalent here, note) as Markdown: a list of equal ones, a row per note."""
    lines, kinds = [], ("the same", "no effect", "refused")
    if same := [f"`{code}`" for code, what, _ in rows if what == kinds[0]]:
        lines += [f"The same: {', '.join(same)}.", ""]
    if renamed := [f"| `{code}` | {what} | {note} |" for code, what, note in rows if what not in kinds]:
        lines += ["| vLLM | here | |", "|---|---|---|", *renamed, ""]
    found: dict[str, dict[str, list[str]]] = {}
    for code, what, note in rows:
        if what in kinds[1:]:
            found.setdefault(note, {kind: [] for kind in kinds[1:]})[what].append(f"`{code}`")
    if found:
        lines += ["| no effect | refused | |", "|---|---|---|"]
        lines += [f"| {' | '.join(', '.join(codes) for codes in by.values())} | {note} |" for note, by in found.items()]
        lines.append("")
    return lines


def _row(entry: Name, text: str) -> tuple[str, str, str]:
    value = ast.literal_eval(text)
    if entry.here:
        what = f"`{entry.here}={entry.value(value)!r}`"
    else:
        try:
            refuse_unless_neutral(entry, value)
            what = "no effect"
        except ConfigError:
            what = "refused"
    return f"{entry.name}={text}", what, entry.note


def _fields(path: str) -> Iterator[tuple[str, str, str]]:
    """Yields a request's fields as rows of `table`."""

    model, body = CompletionRequest, {"prompt": "a"}
    if "chat" in path:
        model, body = ChatRequest, {"messages": [{"role": "user", "content": "a"}]}
    for text in map(str.strip, _FIELDS[path].split(";")):
        [(name, value)] = json.loads(f"{{{text}}}").items()
        unread = value is None or name in ("user", "spaces_between_special_tokens", "parallel_tool_calls")
        what = "no effect" if unread or name not in model.model_fields else "the same"
        if name in UNSUPPORTED and name not in model.model_fields:
            try:
                validate(model, {**body, name: int(value) if isinstance(value, float) else value})
            except APIError:
                what = "refused"
        yield text, what, ""


def _flags() -> Iterator[tuple[str, str, str]]:
    """Yields flags of `vllm serve` as rows of `table`."""
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


if __name__ == "__main__":
    print(page(), end="")
