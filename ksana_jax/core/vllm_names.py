"""vLLM's keywords: their names here, or why they are not supported. No jax.

One table feeds the keywords that `LLM`, `generate` and `SamplingParams` accept, their errors, and
docs/use/coming-from-vllm.md.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any, NamedTuple

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest
from ksana_jax.core.units import GIB

LLM, GENERATE, CHAT, SAMPLING = "LLM", "LLM.generate", "LLM.chat", "SamplingParams"


ANY = ("any value",)


class Name(NamedTuple):
    """A vLLM keyword that has another name here, or none.

    Args:
      where: LLM, GENERATE, CHAT or SAMPLING. name: vLLM's name.
      note: one sentence on why other values are refused, or on the alternative.
      neutral: values that request this engine's only behaviour; they are accepted without effect.
      here: name of the corresponding setting.
      value: converts vLLM's value to `here`'s.
      examples: values as written in code, for the documentation and its test.
    """

    where: str
    name: str
    note: str
    neutral: Collection[Any] = ()
    here: str = ""
    value: Callable[[Any], Any] = lambda value: value
    examples: tuple[str, ...] = ()


def _from_gib(value: Any) -> Any:
    return int(value * GIB) if checks.is_number(value) else value


def _fraction(value: Any) -> Any:
    return float(value) if checks.is_integer(value) else value


_MEMORY = "fraction of the device's memory for weights, pool and a step; on a CPU, of the machine's"
_SWAP = "GiB of host memory for swapped requests and cached prefixes"
RENAMED = (
    Name(LLM, "gpu_memory_utilization", _MEMORY, (), "memory_fraction", _fraction, ("0.9",)),
    Name(LLM, "num_gpu_blocks_override", "blocks in the pool", here="num_blocks", examples=("64",)),
    Name(LLM, "swap_space", _SWAP, (), "host_cache_bytes", _from_gib, ("0.5",)),
    Name(LLM, "preemption_mode", "what happens to a preempted request", here="preempt", examples=('"swap"',)),
)

# Keywords without a name here: a note, and below it the keywords that it explains, each as
#     NAME = values that request this engine's only behaviour | examples; for; the; documentation
MISSING = {
    LLM: """
policy= selects a built-in order, or takes a function of your own
    scheduling_policy = "fcfs" | "fcfs"; "priority"
one process drives all devices; tensor_parallel_size= divides heads and matrices among them
    pipeline_parallel_size = 1 | 1; 2
    distributed_executor_backend = None | "ray"
    disable_custom_all_reduce = True, False | True
distributed= names the processes that divide a model, and which one this is; `ksana worker` runs the others
    nnodes = 1 | 1; 2
    node_rank = 0 | 0; 1
    master_addr = any | "10.0.0.1"
    master_port = any | 29501
steps are always compiled, once per bucket of shapes; `llm.warm_up()` compiles them ahead of time
    enforce_eager = True, False | True
    compilation_config = any | 3
    max_seq_len_to_capture = any | 8192
every engine can sleep: `llm.sleep()`, `llm.wake_up()`
    enable_sleep_mode = True, False | True
each step's record is in `llm.records`
    disable_log_stats = True, False | True
code in a checkpoint is never run
    trust_remote_code = False | False; True
prompts are always computed in chunks of up to max_num_batched_tokens
    enable_chunked_prefill = True, None | True; False
weights stay on the device; embedding_device="host" moves the embedding to the host
    cpu_offload_gb = 0, 0.0 | 4
the tokenizer is the model's; `tokenizer="org/name@revision"` names another
    tokenizer_revision = None | "main"
code in a checkpoint is never run
    code_revision = None
huggingface_hub downloads: HF_HOME names its folder, HF_TOKEN or `hf auth login` its token
    download_dir = None | "/models"
    hf_token = None, False
edit the directory's config.json
    hf_overrides = None | {"rope_theta": 1e6}
tokenizer.json and SentencePiece files are read
    tokenizer_mode = "auto" | "slow"
give prompt_token_ids and detokenize=False; the tokenizer is then not used
    skip_tokenizer_init = False | True
up to 20 log-probabilities per token
    max_logprobs = 0..20 | 20; 50
speculative_config= has all settings, with "method" and the settings of that method
    speculative_model = None | "ngram"
    num_speculative_tokens = None | 4
no guided decoding yet; allowed_token_ids is in SamplingParams
    guided_decoding_backend = None, "auto" | "xgrammar"
sampling settings come from SamplingParams only; EOS ids are the union of this file's, config.json's and the tokenizer's
    generation_config = None, "auto", "vllm" | "auto"
text only
    limit_mm_per_prompt = None | {"image": 1}
pattern="full" attends to everything
    disable_sliding_window = False | True
models generate; there are no embeddings or scores
    task = "auto", "generate" | "generate"; "embed"
    runner = "auto", "generate" | "pooling"
`ksana serve --served-model-name` names the model
    served_model_name = None | "llama"
""",
    GENERATE: """
adapters are LoRA: lora_request=
    prompt_adapter_request = None
no priorities per request; LLM(policy=...) orders requests
    priority = None | [1]
no guided decoding yet; allowed_token_ids is in SamplingParams
    guided_options_request = None
""",
    CHAT: """
text only: parts of a content are joined by line breaks
    chat_template_content_format = "auto", "string" | "auto"; "openai"
    mm_processor_kwargs = None | {"a": 1}
""",
    SAMPLING: """
ask for n completions with logprobs=0 and take the best by cumulative_logprob
    best_of = None | 4
beam_width=4 searches with four beams
    use_beam_search = False | True
a beam search ends when no beam can become one of the best
    early_stopping = False
Python cannot run within a compiled step; use logit_bias, allowed_token_ids or bad_words
    logits_processors = None | ['a function']
no guided decoding yet; allowed_token_ids restricts tokens
    guided_decoding = None | {"json": "{}"}
    structured_outputs = None | {"json": "{}"}
a tokenizer's own spaces are kept
    spaces_between_special_tokens = True, False | False
shorten the prompt_token_ids yourself; `ksana serve` takes it with a request
    truncate_prompt_tokens = None, -1 | 8
`generate` returns complete outputs, `stream` the text so far or, with `delta=True`, its new part
    output_kind = any
there are no further arguments
    extra_args = None | {"a": 1}
""",
}


def read_table(where: str, table: str) -> Iterator[Name]:
    """Yields the names of a table such as MISSING."""
    note = ""
    for line in table.strip().splitlines():
        if line.startswith(" "):
            name, values = line.strip().split(" = ", 1)
            neutral, _, examples = values.partition(" | ")
            yield Name(where, name, note, _values(neutral), examples=tuple(filter(None, examples.split("; "))))
        else:
            note = line


def _values(text: str) -> Collection[Any]:
    first, dots, last = text.partition("..")
    if dots:
        return range(int(first), int(last) + 1)
    return ANY if text == "any" else ast.literal_eval(f"({text},)")


NAMES = (*RENAMED, *(name for where, table in MISSING.items() for name in read_table(where, table)))


def translated(given: Mapping[str, Any], where: str, known: Set[str]) -> dict[str, Any]:
    """Translates vLLM's keyword arguments to this engine's.

    Args:
      where: LLM, GENERATE, CHAT or SAMPLING, or another method, which has no names of vLLM.
      known: names that are valid here.

    Raises:
      ConfigError: a name is unknown (the nearest one or an alternative is named), or vLLM's value is not supported.
    """
    if given.keys() <= known:
        return dict(given)
    table = {entry.name: entry for entry in NAMES if entry.where == where}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            pass
        elif name not in table:
            close = nearest(name, [*known, *table])
            raise ConfigError(f"{where} has no setting {name!r}" + (f"; the nearest is {close!r}" if close else ""))
        elif not table[name].here:
            refuse_unless_neutral(table[name], value)
            continue
        else:
            name, value = table[name].here, table[name].value(value)
            if name in given:
                twice = next(n for n in given if n in table and table[n].here == name)
                raise ConfigError(f"{twice} and {name} are two names of one setting; give only one")
        found[name] = value
    return found


def refuse_unless_neutral(entry: Name, value: Any) -> None:
    """Raises ConfigError for a value that requests other behaviour than this engine's."""
    # Types must match too: True is not 1 here.
    if entry.neutral is not ANY and not any(type(value) is type(n) and value == n for n in entry.neutral):
        raise ConfigError(f"{entry.where} does not support {entry.name}={value!r:.60}: {entry.note}")
