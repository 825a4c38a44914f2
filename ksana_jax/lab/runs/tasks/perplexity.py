"""Streaming perplexity: how well each next token is predicted, far beyond the training context, and its KV memory.

Every text is scored in one pass through the engine with the cache policy applied: a token's query sees the same
keys as if the text had been generated. The baseline "sliding window with recomputation" re-runs the window before every
scored token, so it is scored on a sample of positions; every row reports that sample too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import FULL
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.reading import read_bytes, simulated_bytes
from ksana_jax.kv.selection import read_selection
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import run_warm, token_scores
from ksana_jax.lab.runs.models import training_context
from ksana_jax.lab.runs.oracle import foreseen
from ksana_jax.lab.runs.tasks import kept, perplexity_figure
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.perplexity_report import PerplexityResults
from ksana_jax.lab.runs.tasks.results import Measurement, ResultRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM


@dataclasses.dataclass
class PerplexitySettings:
    """Fields of `settings` in a perplexity experiment.

    method: "stream" scores with the engine's cache as it streams, "recompute" re-runs the window for every token.
    texts: files, folders, patterns or file.jsonl#field, see `lab.runs.text_files`; relative to the YAML file.
      Empty takes the held-out texts of the embedded model's corpus. A long text gives several disjoint excerpts; the
      seed draws among all of them, and seeds 0, 1, 2, ... share none as long as there are enough.
    num_texts: number of excerpts to score.
    texts_at_once: number of streamed excerpts that are scored side by side: faster, with the same perplexity. KV
      is measured on the first one alone.
    num_tokens: tokens of each excerpt, BOS included.
    bos: whether excerpts begin with BOS; null does as the tokenizer does.
    stride: tokens between the beginnings of a text's excerpts, which score only tokens that no earlier one has
      scored: num_tokens for segments side by side, fewer for windows that overlap. Null draws disjoint excerpts.
    bucket_tokens: length of a bucket of positions; null takes the model's training context.
    sampled_per_bucket: number of positions of each text and bucket, except the first bucket, that every row is scored
      on, including recomputation.
    context_tokens: number of first tokens of each excerpt that `kv_eviction` compresses before the rest is read, as
      the presses of kvpress do; perplexity of the rest measures the compression. Not with prompts "streamed".
    save_tokens: write every scored token to TRIAL.tokens.npz next to the records: arrays text_digest, position,
      token_id and logprob, with one entry per token. A text's digest and name are in the trial's nll records.
    """

    method: Literal["stream", "recompute"] = "stream"
    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    num_texts: int = int_field(3)
    texts_at_once: int = int_field(1)
    num_tokens: int = int_field(4096, 2)
    bos: bool | None = None
    stride: int | None = None
    bucket_tokens: int | None = int_field(None)
    sampled_per_bucket: int = int_field(0, 0)
    context_tokens: int | None = int_field(None)
    save_tokens: bool = False

    @property
    def cut(self) -> texts.ExcerptSpec:
        return texts.ExcerptSpec(self.num_tokens, self.bos, self.stride, "settings.num_tokens")


class Perplexity(PerplexityResults, BaseTask):
    """The task `perplexity`. See the module's docstring."""

    Settings = PerplexitySettings

    def max_model_len(self, settings: PerplexitySettings) -> int:
        return settings.num_tokens + 1

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = PerplexitySettings(**config["settings"])
        if settings.method == "stream":
            return settings.num_texts * settings.num_tokens
        bucket_tokens = settings.bucket_tokens or training_context(config["model"])
        sample = sample_positions(settings.num_tokens, bucket_tokens, settings.sampled_per_bucket, [0])
        return settings.num_texts * len(sample) * config["pattern"]["window"]

    def num_samples(self, config: Mapping[str, Any]) -> int:
        return config["settings"]["num_texts"]

    def inputs(self, settings: PerplexitySettings) -> dict[str, str]:
        # The excerpts that a seed draws have changed since the first stage.
        return super().inputs(settings) | {"excerpts": "disjoint"}

    def check(self, config: Mapping[str, Any]) -> None:
        settings = PerplexitySettings(**config["settings"])
        eviction = read_eviction(config["engine"]["kv_eviction"])
        if eviction is not None and eviction.prompts != "streamed" and settings.context_tokens is None:
            raise ConfigError(
                f"engine.kv_eviction.prompts is {eviction.prompts!r}, which evicts only after a prompt and would not "
                "act on scored tokens: set it to 'streamed', or give settings.context_tokens"
            )
        selection = read_selection(config["engine"]["kv_selection"])
        if selection is not None and selection.prompts != "streamed":
            raise ConfigError(
                f"engine.kv_selection.prompts is {selection.prompts!r}, which selects only after a prompt and would "
                "not act on scored tokens: set it to 'streamed'"
            )
        if eviction is not None and eviction.needs_full_text and settings.texts_at_once > 1:
            raise ConfigError(
                f"settings.texts_at_once is {settings.texts_at_once}, engine.kv_eviction.method "
                f"{config['engine']['kv_eviction']['method']!r} knows one text at a time"
            )
        if settings.texts_at_once > (most := config["engine"]["max_num_seqs"]):
            raise ConfigError(f"settings.texts_at_once is {settings.texts_at_once}, engine.max_num_seqs is {most}")
        checks.require(
            checks.integer("settings.stride", settings.stride, 1, settings.num_tokens, optional=True), error=ConfigError
        )
        if settings.stride is not None and settings.sampled_per_bucket:
            raise ConfigError("settings.stride is given, but sampled positions may be in two overlapping excerpts")
        if (context := settings.context_tokens) is not None:
            if eviction is not None and eviction.prompts == "streamed":
                raise ConfigError(
                    "settings.context_tokens is given, but engine.kv_eviction.prompts is 'streamed', which evicts "
                    "before and after it: set it to 'whole' or 'once'"
                )
            if context >= settings.num_tokens:
                raise ConfigError(
                    f"settings.context_tokens is {context:,}, must be less than num_tokens {settings.num_tokens:,}"
                )
            if settings.method == "recompute":
                raise ConfigError(
                    "settings.context_tokens is given, but settings.method 'recompute' compresses nothing"
                )
        if settings.method == "recompute":
            pattern = config["pattern"] or {}
            if pattern.get("window") is None or config["layer_patterns"]:
                raise ConfigError("settings.method 'recompute' needs pattern.window, the tokens that it re-runs")
            if pattern != dataclasses.asdict(FULL) | {"window": pattern["window"]}:
                raise ConfigError("settings.method 'recompute' supports pattern.window and no other field of it")
            if settings.sampled_per_bucket < 1:
                raise ConfigError("settings.method 'recompute' needs settings.sampled_per_bucket of 1 or more")
        texts.check_config(config, settings.num_texts, settings.cut, "settings.num_texts")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = PerplexitySettings(**trial.config["settings"]), trial.llm
        bucket_tokens = settings.bucket_tokens or llm.model_config.max_position
        chosen = texts.draw_excerpts(settings.texts, llm.tokenizer, settings.num_texts, settings.cut, trial.seed)
        compiled_before = llm.num_compilations
        streams = settings.method == "stream"
        eviction = read_eviction(trial.config["engine"]["kv_eviction"])
        foresees = eviction is not None and eviction.needs_full_text
        at_once = settings.texts_at_once if streams else 1
        scored: list[tuple[texts.Excerpt, np.ndarray, np.ndarray]] = []
        masks_of: dict[str, np.ndarray] = {}
        masks: list[np.ndarray] = []
        for begin in range(0, len(chosen), at_once):
            group = chosen[begin : begin + at_once]
            samples = [
                sample_positions(len(excerpt.ids), bucket_tokens, settings.sampled_per_bucket, [trial.seed, index])
                for index, excerpt in enumerate(group, start=begin)
            ]
            if not streams and not len(samples[0]):
                raise ConfigError(
                    f"{len(group[0].ids):,} tokens are one bucket of {bucket_tokens:,}: nothing to sample beyond it"
                )
            if streams:
                ids = [excerpt.ids for excerpt in group]
                work = functools.partial(_stream, llm, ids, settings.context_tokens, masks)
            else:
                window = trial.config["pattern"]["window"]
                work = functools.partial(_recompute, llm, group[0].ids, window, samples[0])
            with foreseen(llm, group[0].ids) if streams and foresees else contextlib.nullcontext():
                found, seconds, compiled = run_warm(llm, work)
            if streams and llm.config.kept_tokens:
                masks_of |= {excerpt.digest: mask for excerpt, mask in zip(group, masks, strict=True)}
            num_scored = 0
            for excerpt, sample, log_probs in zip(group, samples, found, strict=True):
                positions, subset = sample, "sampled"
                if streams:
                    positions, subset = np.arange(excerpt.first_scored, len(excerpt.ids)), "all"
                    sampled, log_probs = log_probs[sample - 1], log_probs[positions - 1]
                num_scored += len(positions)
                scored.append((excerpt, positions, log_probs))
                yield from _by_bucket(excerpt, subset, positions, log_probs, bucket_tokens)
                if streams and len(sample):
                    yield from _by_bucket(excerpt, "sampled", sample, sampled, bucket_tokens)
            yield {
                "metric": "speed",
                "text": group[0].name,
                "num_texts": len(group),
                "num_scored": num_scored,
                "seconds": seconds,
                "compiled_while_timed": compiled,
            }
            yield {"metric": "kv", "text": group[0].name, **_kv_alone(llm, trial, group, samples)}
            trial.progress((begin + len(group)) / len(chosen))
        if settings.save_tokens:
            yield {"metric": "tokens", "file": trial.save("tokens", **_tokens(scored))}
        yield from kept.measured(trial, masks_of)
        yield {
            "metric": "compilations",
            "count": llm.num_compilations - compiled_before,
            "in_all": llm.num_compilations,
        }

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        perplexity_figure.draw(figure, rows, self.headline(rows))


def _stream(
    llm: LLM, group: Sequence[list[int]], num_context: int | None = None, kept: list[Any] | None = None
) -> list[np.ndarray]:
    """Returns for each text the log-probabilities [len(ids) - 1] of ids[1:], given the tokens that the cache still
    holds. kept: see `token_scores`."""
    prompts = [
        {"prompt_token_ids": ids}
        if num_context is None
        else {"prompt_token_ids": ids[:num_context], "question_token_ids": ids[num_context:]}
        for ids in group
    ]
    return [np.array([score.logprob for score in found]) for found in token_scores(llm, prompts, kept)]


def _recompute(llm: LLM, ids: list[int], window: int, positions: np.ndarray) -> list[np.ndarray]:
    """Returns the log-probabilities of the tokens at some positions of one text."""
    from ksana_jax.engine.recompute import score

    llm.set_pattern(FULL)
    return [np.asarray(score(llm, ids, window, positions.tolist()))]


def sample_positions(num_tokens: int, bucket_tokens: int, per_bucket: int, seed: Sequence[int]) -> np.ndarray:
    """Draws sorted text positions, per_bucket or all from each bucket but the first; equal in every row."""
    rng = np.random.default_rng(seed)
    picked = [np.zeros(0, np.int64)]
    for start in range(bucket_tokens, num_tokens, bucket_tokens):
        bucket = np.arange(start, min(start + bucket_tokens, num_tokens))
        picked.append(rng.choice(bucket, min(per_bucket, len(bucket)), replace=False))
    return np.sort(np.concatenate(picked))


def _by_bucket(
    excerpt: texts.Excerpt, subset: str, positions: np.ndarray, log_probs: np.ndarray, bucket_tokens: int
) -> Iterator[Measurement]:
    sums: dict[int, list[float]] = defaultdict(list)
    for position, value in zip(positions.tolist(), log_probs.tolist(), strict=True):
        sums[position // bucket_tokens].append(value)
    digest = hashlib.sha256(positions.astype("<i8").tobytes()).hexdigest()[:12]
    for bucket, values in sorted(sums.items()):
        yield {
            "metric": "nll",
            "text": excerpt.name,
            "text_digest": excerpt.digest,
            "text_tokens": len(excerpt.ids),
            "bos": excerpt.bos,
            "subset": subset,
            "bucket": bucket,
            "bucket_tokens": bucket_tokens,
            "sum": -math.fsum(values),
            "count": len(values),
            "positions": digest,
        }


def _tokens(scored: Sequence[tuple[texts.Excerpt, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the columns of a table with one row per scored token."""
    return {
        "text_digest": np.repeat([e.digest for e, _, _ in scored], [len(p) for _, p, _ in scored]),
        "position": np.concatenate([p for _, p, _ in scored]).astype(np.int32),
        "token_id": np.concatenate([np.array(e.ids)[p] for e, p, _ in scored]).astype(np.int32),
        "logprob": np.concatenate([v for _, _, v in scored]),
    }


def _kv_alone(
    llm: LLM, trial: TrialContext, group: Sequence[texts.Excerpt], samples: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Measures the blocks of one text, or of one recomputed window; runs it again unless it was the only one."""
    ids, method = group[0].ids, trial.config["settings"]["method"]
    if method == "recompute":
        llm.clear_records()
        window = trial.config["pattern"]["window"]
        _recompute(llm, ids, window, samples[0][-1:])
        return {"method": method, **_kv(llm, window)}
    if len(group) > 1:
        llm.clear_records()
        _stream(llm, [ids], trial.config["settings"]["context_tokens"])
    num_context, layout = trial.config["settings"]["context_tokens"] or len(ids), llm.engine.scheduler.layout
    held = _blocks_over_text(llm, len(ids), num_context)
    if layout.eviction is not None and layout.eviction.method.hides:
        held["simulated_bytes"] = simulated_bytes(layout, held["position"][-1], num_context)
    read = read_bytes(layout, len(ids), held["held_blocks"])
    return {"method": method, **_kv(llm, len(ids)), **held, "read_bytes": read}


def _kv(llm: LLM, num_tokens: int) -> dict[str, Any]:
    """Measures the KV of the one running sequence, from the engine's records.

    Returns:
      weight_bytes: memory of the weights. token_bytes: bytes per token at a length of num_tokens. peak_blocks: maximum
        held within a step.
    """
    return {
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.params)),
        "block_bytes": llm.block_bytes,
        "token_bytes": llm.kv_bytes_per_token(num_tokens),
        "peak_blocks": max(int(r.peak_blocks) for r in llm.records),
        "num_preemptions": sum(int(r.num_preemptions) for r in llm.records),
    }


def _blocks_over_text(llm: LLM, num_tokens: int, num_context: int) -> dict[str, Any]:
    """Measures the blocks of the one streamed text.

    Returns:
      held_blocks: after its last token. For each step: position, tokens computed after it; live_blocks, blocks held
      after it.
    """
    live = [int(r.live_blocks) for r in llm.records]
    computed = np.cumsum([r.num_tokens for r in llm.records])
    # Tokens beyond the text's probe its context.
    after = np.maximum(computed - max(computed[-1] - num_tokens, 0), num_context)
    return {
        "held_blocks": live[-1],
        "position": np.where(computed > num_context, after, computed).tolist(),
        "live_blocks": live,
    }
