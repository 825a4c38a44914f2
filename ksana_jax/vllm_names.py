"""Names that vLLM's users bring: what each is called here, or why it is not here. No jax.

One table feeds the keywords that `LLM`, `generate` and `SamplingParams` take, their errors, and
docs/coming-from-vllm.md (`python -m ksana_jax.vllm_names` prints it).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

from ksana_jax.errors import ConfigError
from ksana_jax.plugins import nearest
from ksana_jax.units import GIB

LLM, GENERATE, SAMPLING = "LLM", "LLM.generate", "SamplingParams"


ANY = ("any value",)


class Name(NamedTuple):
    """One keyword of vLLM's that has another name here, or none.

    Args:
      where: LLM, GENERATE or SAMPLING. name: vLLM's.
      note: one sentence: why other values are refused, or what stands in for it here.
      neutral: values that ask for what happens here anyway; they are accepted and change nothing.
      here: the setting that it is called here.
      value: vLLM's value as that of `here`.
      examples: values, as they are written in code, for the documentation and its test.
    """

    where: str
    name: str
    note: str
    neutral: Collection[Any] = ()
    here: str = ""
    value: Callable[[Any], Any] = lambda value: value
    examples: tuple[str, ...] = ()


def _from_gib(value: Any) -> Any:
    return int(value * GIB) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _fraction(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


_ONE_DEVICE = "one process drives one device"
_LOCAL = "models are local directories: `hf download NAME --revision REV --local-dir DIR`"
_GRAPHS = "steps are compiled either way, once for each bucket of shapes; `llm.warm_up()` compiles them ahead"

NAMES = (
    Name(
        LLM,
        "gpu_memory_utilization",
        "the device's memory for weights, pool and a step; on a CPU the machine's",
        here="memory_fraction",
        value=_fraction,
        examples=("0.9",),
    ),
    Name(LLM, "num_gpu_blocks_override", "blocks in the pool", here="num_blocks", examples=("64",)),
    Name(
        LLM,
        "swap_space",
        "GiB of host memory for swapped requests and cached prefixes",
        here="host_cache_bytes",
        value=_from_gib,
        examples=("0.5",),
    ),
    Name(LLM, "preemption_mode", "what becomes of a request that makes room", here="preempt", examples=('"swap"',)),
    Name(
        LLM,
        "scheduling_policy",
        "policy= has several orders, and takes a function of your own",
        ("fcfs",),
        examples=('"fcfs"', '"priority"'),
    ),
    Name(LLM, "tensor_parallel_size", _ONE_DEVICE, (1,), examples=("1", "2")),
    Name(LLM, "pipeline_parallel_size", _ONE_DEVICE, (1,), examples=("1", "2")),
    Name(LLM, "data_parallel_size", _ONE_DEVICE, (1,), examples=("1",)),
    Name(LLM, "distributed_executor_backend", _ONE_DEVICE, (None,), examples=('"ray"',)),
    Name(LLM, "enforce_eager", _GRAPHS, (True, False), examples=("True",)),
    Name(LLM, "compilation_config", _GRAPHS, ANY, examples=("3",)),
    Name(LLM, "max_seq_len_to_capture", _GRAPHS, ANY, examples=("8192",)),
    Name(LLM, "disable_custom_all_reduce", _ONE_DEVICE, (True, False), examples=("True",)),
    Name(LLM, "disable_log_stats", "each step's record is in `llm.records`", (True, False), examples=("True",)),
    Name(LLM, "trust_remote_code", "code in a checkpoint is never run", (False,), examples=("False", "True")),
    Name(
        LLM,
        "enable_chunked_prefill",
        "prompts are always computed in chunks of up to max_num_batched_tokens",
        (True, None),
        examples=("True", "False"),
    ),
    Name(LLM, "num_scheduler_steps", "each step is scheduled", (1,), examples=("1",)),
    Name(LLM, "quantization", "weights are f32, bf16 or f16", (None,), examples=('"awq"',)),
    Name(LLM, "kv_cache_dtype", "keys and values have the engine's dtype", ("auto",), examples=('"auto"', '"fp8"')),
    Name(
        LLM,
        "cpu_offload_gb",
        'weights stay on the device; embedding_device="host" takes the embedding off it',
        (0, 0.0),
        examples=("4",),
    ),
    Name(
        LLM,
        "device",
        "jax chooses: set JAX_PLATFORMS=cpu in the environment for the CPU",
        ("auto", None),
        examples=('"cpu"',),
    ),
    Name(LLM, "revision", _LOCAL, (None,), examples=('"main"',)),
    Name(LLM, "tokenizer_revision", _LOCAL, (None,), examples=('"main"',)),
    Name(LLM, "code_revision", _LOCAL, (None,)),
    Name(LLM, "download_dir", _LOCAL, (None,), examples=('"/models"',)),
    Name(LLM, "hf_token", _LOCAL, (None, False)),
    Name(LLM, "hf_overrides", "edit the directory's config.json", (None,), examples=('{"rope_theta": 1e6}',)),
    Name(LLM, "tokenizer_mode", "tokenizer.json and SentencePiece files are read", ("auto",), examples=('"slow"',)),
    Name(
        LLM,
        "skip_tokenizer_init",
        "give prompt_token_ids and detokenize=False; the tokenizer is then not asked",
        (False,),
        examples=("True",),
    ),
    Name(LLM, "max_logprobs", "up to 20 log-probabilities a token", range(21), examples=("20", "50")),
    Name(LLM, "enable_lora", "no adapters: merge them into the weights", (False,), examples=("True",)),
    Name(LLM, "speculative_config", "no speculative decoding yet", (None,), examples=('{"method": "ngram"}',)),
    Name(LLM, "speculative_model", "no speculative decoding yet", (None,), examples=('"ngram"',)),
    Name(
        LLM,
        "guided_decoding_backend",
        "no guided decoding yet; allowed_token_ids is in SamplingParams",
        (None, "auto"),
        examples=('"xgrammar"',),
    ),
    Name(
        LLM,
        "generation_config",
        "sampling settings are what SamplingParams says; end ids are read from the file",
        (None, "auto", "vllm"),
        examples=('"auto"',),
    ),
    Name(LLM, "limit_mm_per_prompt", "text only", (None,), examples=('{"image": 1}',)),
    Name(LLM, "disable_sliding_window", 'pattern="full" attends to everything', (False,), examples=("True",)),
    Name(
        LLM,
        "task",
        "models generate; there are no embeddings or scores",
        ("auto", "generate"),
        examples=('"generate"', '"embed"'),
    ),
    Name(
        LLM,
        "runner",
        "models generate; there are no embeddings or scores",
        ("auto", "generate"),
        examples=('"pooling"',),
    ),
    Name(LLM, "served_model_name", "there is no server", (None,), examples=('"llama"',)),
    Name(GENERATE, "lora_request", "no adapters: merge them into the weights", (None,), examples=("None", '"adapter"')),
    Name(GENERATE, "prompt_adapter_request", "no adapters", (None,)),
    Name(GENERATE, "priority", "LLM(policy=...) orders requests by what it sees of them", (None,), examples=("[1]",)),
    Name(GENERATE, "guided_options_request", "no guided decoding yet; allowed_token_ids is in SamplingParams", (None,)),
    Name(
        SAMPLING,
        "best_of",
        "ask for n completions with logprobs=0 and take the best by cumulative_logprob",
        (None,),
        examples=("4",),
    ),
    Name(SAMPLING, "use_beam_search", "beam_width=4 searches with four beams", (False,), examples=("True",)),
    Name(SAMPLING, "early_stopping", "a beam search ends when no beam can become one of the best", (False,)),
    Name(
        SAMPLING,
        "logits_processors",
        "Python cannot run within a compiled step; logit_bias, allowed_token_ids and "
        "bad_words change scores on the device",
        (None,),
        examples=("['a function']",),
    ),
    Name(
        SAMPLING,
        "guided_decoding",
        "no guided decoding yet; allowed_token_ids is there",
        (None,),
        examples=('{"json": "{}"}',),
    ),
    Name(
        SAMPLING,
        "structured_outputs",
        "no guided decoding yet; allowed_token_ids is there",
        (None,),
        examples=('{"json": "{}"}',),
    ),
    Name(
        SAMPLING,
        "include_stop_str_in_output",
        "stop strings are no part of the text; stop_reason says which it was",
        (False,),
        examples=("True",),
    ),
    Name(
        SAMPLING,
        "spaces_between_special_tokens",
        "a tokenizer's own spaces are kept",
        (True, False),
        examples=("False",),
    ),
    Name(SAMPLING, "truncate_prompt_tokens", "shorten the prompt_token_ids yourself", (None, -1), examples=("8",)),
    Name(SAMPLING, "output_kind", "`generate` returns whole outputs, `stream` yields what there is so far", ANY),
    Name(SAMPLING, "extra_args", "there is nothing else to pass on", (None,), examples=('{"a": 1}',)),
)


def translated(given: Mapping[str, Any], where: str, known: Set[str]) -> dict[str, Any]:
    """Returns keyword arguments by their names here.

    Args:
      where: LLM, GENERATE or SAMPLING.
      known: names that are taken here.

    Raises:
      ConfigError: a name is unknown, with the nearest one or what is here instead; a value of vLLM's is not supported.
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
            _refuse_unless_neutral(table[name], value)
            continue
        else:
            name, value = table[name].here, table[name].value(value)
            if name in given:
                twice = next(n for n in given if n in table and table[n].here == name)
                raise ConfigError(f"{twice} and {name} are two names of one setting; give one of them")
        found[name] = value
    return found


def _refuse_unless_neutral(entry: Name, value: Any) -> None:
    # By type too: True is not 1 here.
    if entry.neutral is not ANY and not any(type(value) is type(n) and value == n for n in entry.neutral):
        raise ConfigError(f"{entry.where} does not support {entry.name}={value!r:.60}: {entry.note}")


# Keywords of vLLM's that are the same here, with a value for the documentation and its test.
SAME = {
    LLM: (
        'dtype="bfloat16"',
        'dtype="float16"',
        'dtype="half"',
        'dtype="float32"',
        'dtype="auto"',
        "max_model_len=128",
        "max_num_seqs=8",
        "max_num_batched_tokens=64",
        "block_size=16",
        "enable_prefix_caching=True",
        "seed=1",
        'load_format="dummy"',
        'tokenizer="ksana-tiny"',
    ),
    GENERATE: (
        'prompts="a text"',
        'prompts=["a", "b"]',
        "prompts=[5, 6, 7]",
        "prompts=[[5, 6, 7], [8]]",
        'prompts={"prompt_token_ids": [5, 6, 7]}',
        "prompt_token_ids=[[5, 6, 7]]",
        "use_tqdm=True",
        "sampling_params=SamplingParams(max_tokens=2)",
        "sampling_params=[SamplingParams(max_tokens=2)]",
    ),
    SAMPLING: (
        "n=2",
        "temperature=0.7",
        "top_k=-1",
        "top_p=0.9",
        "min_p=0.1",
        "repetition_penalty=1.2",
        "presence_penalty=0.5",
        "frequency_penalty=0.5",
        "seed=1",
        'stop=["x"]',
        "stop_token_ids=[7]",
        "ignore_eos=True",
        "min_tokens=1",
        "max_tokens=None",
        "logprobs=2",
        "prompt_logprobs=2",
        "detokenize=False",
        "skip_special_tokens=False",
        "logit_bias={5: -100}",
        "allowed_token_ids=[5, 6]",
        'bad_words=["no"]',
    ),
}

_HEAD = """# Coming from vLLM

`LLM`, `SamplingParams`, `RequestOutput` and `CompletionOutput` have vLLM's names and meaning. Each line of the tables
is a test. Any other keyword is refused in one sentence with the nearest name.

What else differs:

- `use_tqdm` is off by default: scripts and notebooks that call `generate` often stay quiet. `use_tqdm=True` draws a
  progress bar on standard error.
- `dtype` is `"f32"` by default, not `"auto"`: it is exact, and the tests' reference.
- `enable_prefix_caching` is off by default: a measurement that repeats its prompts would otherwise measure the cache.
- `cumulative_logprob` is there whenever `logprobs` was asked for, if only `logprobs=0`; otherwise it is None.
- `llm.get_tokenizer()` and `with LLM(...) as llm:` work. Beam search is `SamplingParams(beam_width=4)`.
- There is no `AsyncLLMEngine` and no server; `llm.stream(...)` yields outputs as they grow.
"""


def page() -> str:
    """Returns docs/coming-from-vllm.md."""
    lines = [_HEAD]
    for where in (LLM, GENERATE, SAMPLING):
        lines += [f"## {where}", "", "| vLLM | here | |", "|---|---|---|"]
        lines += [f"| `{text}` | the same | |" for text in SAME[where]]
        for entry in NAMES:
            if entry.where == where:
                lines += [_line(entry, text) for text in entry.examples]
        lines.append("")
    return "\n".join(lines)


def _line(entry: Name, text: str) -> str:
    value = ast.literal_eval(text)
    if entry.here:
        what = f"`{entry.here}={entry.value(value)!r}`"
    else:
        try:
            _refuse_unless_neutral(entry, value)
            what = "no effect"
        except ConfigError:
            what = "refused"
    return f"| `{entry.name}={text}` | {what} | {entry.note} |"


if __name__ == "__main__":
    print(page(), end="")
