"""Settings that an engine refuses together: one list, each with its reason. No jax.

python -m ksana_jax.core.refusals      prints the table in docs/reference/status.md
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from ksana_jax.core.errors import ConfigError


class Refusal(NamedTuple):
    """Two settings that an engine refuses together.

    reason: why, as it follows the names of both in the error. principle: whether no implementation could serve both;
    otherwise it is merely not built.
    """

    setting: str
    other: str
    reason: str
    principle: bool = False


# Settings of an engine that are in use unless they are None, False or empty.
SETTINGS = (
    "kv_eviction",
    "kv_selection",
    "kv_full_precision_layers",
    "speculative_config",
    "enable_prefix_caching",
    "enable_lora",
    "shared_prefix_attention",
    "distributed",
    "disk_cache_dir",
    "kept_tokens",
)
# Names of properties that several settings, or only some values of one, share.
ADDS_UP_ATTENTION = "kv_eviction that adds up attention"
COMPARES_HEADS = "kv_eviction that compares heads"
FEWER_BITS = "kv_eviction that keeps tokens in fewer bits"
WHOLE_BLOCKS = "kv_cache_dtype that encodes whole blocks"
CACHES_EVICTED = "kv_eviction with enable_prefix_caching"
REWRITES = "kv_eviction that merges, hides, measures, probes or keeps tokens in fewer bits"
ROTATES_READ = "kv_cache_dtype that rotates keys when they are read"
NOT_NATIVE = "kv_cache_dtype other than f32, bf16, f16 and int8"
UNEVEN = "groups of layers in which they are not equally many"
NO_FULL_LAYER = "patterns without a layer of full attention"
BY_HEAD = "patterns that differ between the kv heads of a layer"
HEADS_APART = "kv_eviction that frees the memory of single kv heads"
SHARED_KV, OTHER_PATTERN = "layers that read another layer's keys and values", "another pattern than that layer's"
RECURRENT = "a model with recurrent layers"
LATENTS, READS_OUTPUTS = "a model with latents", "kv_eviction that reads the output matrix of each head"
NO_LATENTS = "a model without latents"
INDEXER, NO_INDEXER = "kv_selection lightning_indexer", "a model without an indexer"
ALIBI, ABSOLUTE = "a model with ALiBi", 'kv_eviction with positions "absolute"'
BRANCHES = "speculative_config with branches"
COMPARES = 'speculative_config with another acceptance than "sampled"'
DRAFT_MODEL = "speculative_config with a draft model"
INVARIANT = 'numerics "invariant"'
HOST_EMBEDDING = 'embedding_device "host"'
PREFER = "operators.prefer"
BIASES = "penalties, logit_bias, bad_words or allowed_token_ids"
FORBIDS = "bad_words or allowed_token_ids"

REFUSALS = (
    Refusal(
        "kv_eviction", "disk_cache_dir", "the disk tier stores single blocks, and a snapshot is several: save sessions"
    ),
    Refusal("kv_eviction", "shared_prefix_attention", "rows that evict have separate blocks", principle=True),
    Refusal(REWRITES, WHOLE_BLOCKS, "tokens that move are decoded and encoded again, and nothing else of them changes"),
    Refusal(ROTATES_READ, ABSOLUTE, "tokens that move keep no position to rotate by: set positions to 'cache'"),
    Refusal("kv_eviction", NO_FULL_LAYER, "patterns decide to which tokens later queries attend", principle=True),
    Refusal(ABSOLUTE, ALIBI, "its biases are computed from positions in the cache: set positions to 'cache'"),
    Refusal("kv_selection", "kv_eviction", "summaries would describe keys that have been evicted"),
    Refusal("kv_selection", WHOLE_BLOCKS, "queries read codes and exact keys of one sequence from different blocks"),
    Refusal("kv_selection", "kv_full_precision_layers", "keys are read by head from one kind of block"),
    Refusal("kv_selection", NO_FULL_LAYER, "queries select in layers with full attention only"),
    Refusal("kv_selection", ALIBI, "scores of summaries have no biases by distance"),
    Refusal("kv_selection", "shared_prefix_attention", "each row selects its own blocks of a shared prefix"),
    Refusal("kv_selection", BRANCHES, "a block is selected for its keys of all branches"),
    Refusal(INDEXER, NO_INDEXER, "scores of tokens are products with its weights", principle=True),
    Refusal("speculative_config", ADDS_UP_ATTENTION, "the attention of rejected draft tokens would count"),
    Refusal("speculative_config", WHOLE_BLOCKS, "rejected draft tokens would be in blocks that are encoded once"),
    Refusal(BY_HEAD, "kv_eviction", "a method compares the heads of a layer, whose blocks would hold single heads"),
    Refusal(BY_HEAD, "kv_selection", "a step selects for all heads of a layer together"),
    Refusal(BY_HEAD, "kv_full_precision_layers", "blocks hold heads of different layers"),
    Refusal(BY_HEAD, "tensor_parallel_size", "blocks hold single heads, which devices cannot divide"),
    Refusal(HEADS_APART, "kv_full_precision_layers", "blocks hold single heads"),
    Refusal(WHOLE_BLOCKS, "kv_full_precision_layers", "a block holds codes of all layers of its group"),
    Refusal(FEWER_BITS, "kv_full_precision_layers", "a slot holds more of their tokens than of other layers'"),
    Refusal(LATENTS, WHOLE_BLOCKS, "it encodes keys and values apart, and latents are both"),
    Refusal(LATENTS, FEWER_BITS, "it encodes keys and values apart, and latents are both"),
    Refusal("kv_cache_dtype latent8", NO_LATENTS, "it encodes latents apart from their rotated numbers"),
    Refusal(LATENTS, READS_OUTPUTS, "that matrix multiplies values, which heads compute from latents"),
    Refusal(SHARED_KV, OTHER_PATTERN, "a block keeps the tokens to which the layer that writes it attends"),
    Refusal("kv_full_precision_layers", UNEVEN, "the blocks of all groups have one shape"),
    Refusal(INVARIANT, "kv_eviction", "attention is added up over the tokens of a step"),
    Refusal(INVARIANT, "kv_selection", "XLA computes the scores of blocks, in its own order"),
    Refusal(INVARIANT, "shared_prefix_attention", "it divides sums by the rows that share blocks", principle=True),
    Refusal(INVARIANT, NOT_NATIVE, "packed codes are untested, and native attention reads no others"),
    Refusal(INVARIANT, PREFER, "there is one implementation of each operator, and no choice", principle=True),
    Refusal(BRANCHES, INVARIANT, "XLA computes the attention of branches, in its own order"),
    Refusal(BRANCHES, COMPARES, "the rules are defined for drafts without branches"),
    Refusal(BRANCHES, "tensor_parallel_size", "accepted tokens are moved on one device"),
    Refusal(COMPARES, "tensor_parallel_size", "each device has a part of the distributions that the rules compare"),
    Refusal(DRAFT_MODEL, "kv_eviction", "it moves tokens within blocks whose ids the draft model's pool shares"),
    Refusal(DRAFT_MODEL, "tensor_parallel_size", "the draft model is on one device"),
    Refusal(DRAFT_MODEL, "data_parallel_size", "there is one draft model, and each replica would need its own"),
    Refusal(DRAFT_MODEL, "distributed", "the draft model is in one process"),
    Refusal(DRAFT_MODEL, HOST_EMBEDDING, "sampled tokens reach the draft model on the device"),
    Refusal(
        "tensor_parallel_size",
        COMPARES_HEADS,
        "each device decides about its own KV heads, each of which must be on one device",
    ),
    Refusal("distributed", "kv_eviction", "eviction in several processes is untested"),
    Refusal("tensor_parallel_size", "kv_selection", "selection on several devices is untested"),
    Refusal("tensor_parallel_size", INVARIANT, "no order of the sums over devices is known"),
    Refusal("tensor_parallel_size", PREFER, "what it chooses by was measured on one device"),
    Refusal("data_parallel_size", "distributed", "replicas are in one process"),
    Refusal("data_parallel_size", "disk_cache_dir", "one engine writes the folder"),
    Refusal("disk_cache_dir", "distributed", "each process has the keys and values of its own heads only"),
    Refusal(HOST_EMBEDDING, "distributed", "each process would send the others its rows"),
    Refusal(RECURRENT, CACHES_EVICTED, "a cached prefix of evicted blocks has no state: set it to false"),
    Refusal(RECURRENT, BRANCHES, "a row has one state, and each branch would need its own"),
    Refusal(RECURRENT, "distributed", "states in several processes are untested"),
    Refusal(RECURRENT, "kept_tokens", "a state does not tell which tokens it has kept", principle=True),
    Refusal(RECURRENT, BY_HEAD, "recurrent layers have no heads with a pattern", principle=True),
    Refusal("enable_lora", "tensor_parallel_size", "each device would need its part of every adapter"),
    Refusal("enable_lora", "data_parallel_size", "a request's adapter has a slot in one engine"),
    Refusal("enable_lora", "distributed", "adapters are in the memory of one process"),
    Refusal("enable_lora", INVARIANT, "the order of an adapter's sums depends on its slot"),
    Refusal("beam_width", "stop", "beams are compared by token, before there is text"),
    Refusal("beam_width", "logprobs", "beams report the sums of their log-probabilities only"),
    Refusal("beam_width", "prompt_logprobs", "beams report the sums of their log-probabilities only"),
    Refusal("beam_width", "min_tokens", "a beam may end at any token"),
    Refusal("beam_width", BIASES, "beams are compared by the model's own probabilities"),
    Refusal("beam_width", "top_k", "the width determines how many continuations are followed", principle=True),
    Refusal("beam_width", "top_p", "the width determines how many continuations are followed", principle=True),
    Refusal("beam_width", "min_p", "the width determines how many continuations are followed", principle=True),
    Refusal("forced_token_ids", "beam_width", "the output is given", principle=True),
    Refusal("forced_token_ids", "stop", "the output is given", principle=True),
    Refusal("forced_token_ids", "stop_token_ids", "the output is given", principle=True),
    Refusal("forced_token_ids", "min_tokens", "the output is given", principle=True),
    Refusal("forced_token_ids", BIASES, "the output is given", principle=True),
    Refusal("structured_outputs", "beam_width", "no grammar follows beams"),
    Refusal("structured_outputs", "ignore_eos", "together they may leave no token", principle=True),
    Refusal("structured_outputs", "min_tokens", "together they may leave no token", principle=True),
    Refusal("structured_outputs", "forced_token_ids", "together they may leave no token", principle=True),
    Refusal("structured_outputs", FORBIDS, "together they may leave no token", principle=True),
)


def of_request(params: Any) -> dict[str, object]:
    """Returns the settings of `SamplingParams` that are in use, as `check` takes them."""
    # Sampling temperature and truncation do not apply; a default of 1 requests nothing.
    return {
        "beam_width": params.beam_width and f"beam_width {params.beam_width}",
        "forced_token_ids": params.forced_token_ids is not None,
        "stop": bool(params.stop_strings),
        "stop_token_ids": bool(params.stop_token_ids),
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "min_tokens": params.min_tokens > 0,
        BIASES: params.penalised,
        FORBIDS: bool(params.bad_words) or params.allowed_token_ids is not None,
        "ignore_eos": params.ignore_eos,
        "structured_outputs": params.structured_outputs is not None,
        "top_k": params.top_k > 0,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
    }


def check(used: Mapping[str, object], error: type[ValueError] = ConfigError) -> None:
    """Checks that settings are compatible.

    Args:
      used: names of `REFUSALS` and whether each is in use; a string is shown instead of the name.

    Raises:
      ConfigError: or the type given as `error`: some are not, and why.
    """
    found = [
        f"{_shown(used, r.setting)} does not go with {_shown(used, r.other)}: {r.reason}"
        for r in REFUSALS
        if used.get(r.setting) and used.get(r.other)
    ]
    if found:
        raise error("; ".join(found))


def _shown(used: Mapping[str, object], name: str) -> str:
    return value if isinstance(value := used[name], str) else name


def table() -> str:
    """Returns the list as Markdown; settings refused for one reason share a line."""
    lines = ["| setting | refused with | why |", "|---|---|---|"]
    for (setting, reason, principle), same in groupby(REFUSALS, lambda r: (r.setting, r.reason, r.principle)):
        others = ", ".join(r.other for r in same)
        lines.append(f"| {setting} | {others} | {reason}{' (in principle)' if principle else ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
