"""`ksana align --choose`: measures the implementations that serve, and writes a verdict."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax import LLM
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.sources import model_path
from ksana_jax.engine.settings import engine_config
from ksana_jax.engine.verdict import Measured, Pair, Verdict, conditions_of, default_path, serving_pairs
from ksana_jax.lab.align import scores
from ksana_jax.lab.align.command import TextSet, draw_prompts, side_settings
from ksana_jax.lab.align.scores import Scores
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.machine_load import Load
from ksana_jax.lab.runs.tasks.agreement import compare, completion
from ksana_jax.loading.load import auto_dtype, open_model
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import Params
from ksana_jax.tokenizers import find_tokenizer

# Alternating runs of each implementation, after one that compiles.
NUM_TIMED = 3
# Settings of the engines that are measured: all texts at once, recomputed each time.
FOR_MEASURING = {
    "numerics": "fast",
    "enable_prefix_caching": False,
    "shared_prefix_attention": False,
    "disk_cache_dir": None,
    "host_cache_bytes": 0,
    "num_blocks": None,
    "memory_fraction": None,
}

# Keywords of `LLM` outside `EngineConfig`.
OF_THE_MODEL: dict[str, Any] = {"pattern": None, "load_format": "auto", "tokenizer": None}

# (number of a text, its tokens [T]) -> the tokens [T - 1] that the reference would choose greedily after each of its
# beginnings, and the log-probabilities [T - 1] of those that follow.
Reference = Callable[[int, Sequence[int]], tuple[np.ndarray, np.ndarray]]


def stored_reference(stored: Scores) -> Reference:
    """Returns the greedy tokens and log-probabilities of a file, which hold as long as a text equals the file's."""
    return lambda text, tokens: (np.array(stored.token_ids[text][1:]), stored.logprobs[text])


def dense_reference(config: ModelConfig, params: Params, max_model_len: int) -> Reference:
    """Returns the reference: the model without a cache, by XLA in float32, with the checkpoint's weights.

    Args:
      config: with its attention patterns. params: weights in float32.

    Raises:
      ValueError: a pattern repositions sinks, which the dense model does not.
    """

    @jax.jit
    def run(params, tokens):
        with jax.default_matmul_precision("highest"):
            logits = dense_logits(params, tokens, config=config, max_len=max_model_len)[:-1]
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=-1)[:, 0]
        return logits.argmax(-1), found

    def reference(text: int, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        greedy, logprobs = run(params, jnp.asarray(tokens, jnp.int32))
        return np.asarray(greedy), np.asarray(logprobs)

    return reference


def measure(
    engines: Mapping[Pair, LLM], reference: Reference, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Measured]:
    """Measures agreement and speed of engines that differ in their implementations.

    Args:
      prompts: token ids of each text. num_tokens: to generate greedily after each.
    """
    params = forced(num_tokens, temperature=0, logprobs=0)
    asked = [{"prompt_token_ids": list(p)} for p in prompts]
    outputs, seconds = {}, {pair: [] for pair in engines}
    for turn in range(1 + NUM_TIMED):
        for pair in list(engines)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            outputs[pair] = engines[pair].generate(asked, params)
            seconds[pair].append(time.perf_counter() - began)
    found = []
    for pair, served in outputs.items():
        texts = []
        for text, (prompt, output) in enumerate(zip(prompts, served, strict=True)):
            tokens, logprobs = completion(output)
            greedy, exact = (x[len(prompt) - 1 :] for x in reference(text, [*prompt, *tokens]))
            texts.append(compare((greedy, exact), (tokens, logprobs)))
        agreed = tuple(m["agreed"] for m in texts)
        mean = sum(m["mean_difference"] * m["agreed"] for m in texts) / max(sum(agreed), 1)
        most = max(m["max_difference"] for m in texts)
        speed = num_tokens * len(prompts) / statistics.median(seconds[pair][1:])
        found.append(Measured(pair.attention, pair.linear, agreed, mean, most, speed))
    return sorted(found, key=lambda m: list(engines).index(m.pair))


def choose(given: str, model: str, texts: TextSet, stored: Scores | None, reference_name: str) -> Verdict:
    """Opens an engine for each pair of implementations that serves some settings, and measures them.

    Args:
      given: settings, as `command.side_settings` takes them. stored: log-probabilities to agree with; None computes
        them.
    """
    name, settings = side_settings(given, model)
    if stored is not None:
        texts = _texts_of(stored)
    lengths = {"max_num_seqs": texts.num_prompts, "max_model_len": texts.prompt_tokens + texts.num_tokens}
    settings |= FOR_MEASURING | lengths
    opened = {key: settings.pop(key, default) for key, default in OF_THE_MODEL.items()}
    config, folder = engine_config(settings), model_path(name)
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, must be 1: verdicts hold for one device"
        )
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=auto_dtype(folder))
    read = functools.partial(
        open_model, folder, load_format=opened["load_format"], seed=config.seed, quantization=config.quantization
    )
    model_config, read_params = read(config.dtype, embedding_device=config.embedding_device)
    params, tokenizer = read_params(), opened["tokenizer"] or find_tokenizer(folder)

    def open_engine(**names: str) -> LLM:
        operators = dataclasses.replace(config.operators, prefer="speed", **names)
        given = dataclasses.asdict(dataclasses.replace(config, operators=operators))
        return LLM.from_params(model_config, params, pattern=opened["pattern"], tokenizer=tokenizer, **given)

    first = open_engine()
    # The first engine's config has the name of the products that were chosen.
    asked = dataclasses.replace(first.config, operators=config.operators)
    pairs = serving_pairs(model_config, asked, first.runner.layout)
    used = Pair(first.runner.implementation.name, first.config.operators.linear)
    engines = {pair: first if pair == used else open_engine(**pair._asdict()) for pair in pairs}
    prompts = draw_prompts(first, texts) if stored is None else stored.prompts()
    if stored is None:
        exact_config, read_exact = read("f32")
        exact_config = dataclasses.replace(exact_config, pattern=first.patterns)
        reference = dense_reference(exact_config, read_exact(), lengths["max_model_len"])
    else:
        reference = stored_reference(stored)
    load = Load()
    measured = measure(engines, reference, prompts, texts.num_tokens)
    num_tokens = texts.num_tokens * texts.num_prompts
    return Verdict(conditions_of(model_config, config), name, reference_name, num_tokens, load.read(), tuple(measured))


def _texts_of(stored: Scores) -> TextSet:
    """Returns the sizes of the texts of a file.

    Raises:
      ConfigError: their numbers of generated tokens differ, or one has none.
    """
    counts = {len(ids) - n for ids, n in zip(stored.token_ids, stored.num_prompt_tokens, strict=True)}
    if len(counts) > 1 or 0 in counts:
        raise ConfigError(
            f"sequences of the reference have {', '.join(map(str, sorted(counts)))} generated tokens; --choose needs "
            "one number above 0"
        )
    return TextSet(len(stored.token_ids), max(stored.num_prompt_tokens), counts.pop(), 0)


def choose_and_show(given: str, stored: str | None, model: str, texts: TextSet, out: Path | None, as_json: bool) -> int:
    """Measures, writes a verdict and prints it; returns the exit code."""
    from rich.console import Console

    from ksana_jax.lab.runs.tables import terminal

    if stored is not None and not stored.endswith(".json"):
        raise ConfigError(f"--choose compares with a .json file of log-probabilities, not with {stored!r}")
    read = None if stored is None else scores.read(Path(stored))
    reference = "the float32 model without a cache" if stored is None else Path(stored).name
    verdict = choose(given, model, texts, read, reference)
    path = out or default_path(verdict.conditions)
    verdict.write(path)
    pairs = [m.pair for m in verdict.measured]
    chosen, reason = verdict.choose(pairs)
    heads = ["attention", "products", "used", "tokens", "first other", "mean", "largest", "tokens/s"]
    rows = []
    for m in verdict.measured:
        others = [n for n in m.agreed if n < verdict.num_tokens // len(m.agreed)]
        ends = [f"{m.mean_difference:.1e}", f"{m.max_difference:.1e}", f"{m.tokens_per_s:,.0f}"]
        used = "yes" if m.pair == chosen else ""
        rows.append([*m.pair, used, f"{sum(m.agreed):,}", str(min(others)) if others else "none", *ends])
    Console().print(terminal(heads, rows, [[False] * len(heads)] * len(rows), 5))
    print(f"{chosen}: {reason}")
    if verdict.others_busy is not None:
        print(f"other programs took {verdict.others_busy:.0%} of the processors' time")
    prefer, dtype = "agreement" if out is None else path, verdict.conditions["dtype"]
    print(f"{path}: for engines with operators.prefer: {prefer} and {dtype}")
    if as_json:
        print(json.dumps({**dataclasses.asdict(verdict), "chosen": chosen, "reason": reason}))
    return 0
