"""Divergence from a reference under generation: two engines decode the same continuation, token by token.

The trial's engine, the row, and a reference engine with the settings `against` and the model's own pattern decode the
same forced tokens after the same prompts, so that every distribution of one has its counterpart of the other. Each
engine also reads the continuation at once, as perplexity is usually measured.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.watched import MAX_DISTRIBUTIONS_BYTES
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced, token_scores
from ksana_jax.lab.runs.tasks import kept
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.paired import check_against, other_engine
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, number, of_metric, percent

if TYPE_CHECKING:
    from ksana_jax import LLM

FULL_CACHE = {"kv_eviction": None, "kv_selection": None, "kv_cache_dtype": "auto", "speculative_config": None}
_MEANS = ("kl", "js", "top1", "nll", "read_nll")


@dataclasses.dataclass
class DivergenceSettings:
    """Fields of `settings` in a divergence experiment.

    against: settings of the reference engine where it differs; fields of `EngineConfig`. By default its cache is full.
    continuation: "text" decodes the text's own next tokens, "greedy" the reference's greedy answer, regardless of EOS.
    texts: files, folders, patterns or file.jsonl#field, as in the task `perplexity`.
    num_texts: number of prompts.
    prompt_tokens: tokens of each prompt, BOS included.
    output_tokens: tokens decoded after each.
    bos: whether prompts begin with BOS; null does as the tokenizer does.
    save_tokens: write every token to TRIAL.tokens.npz next to the records: arrays text_digest, position, token_id,
      logprob, reference_logprob, read_logprob, kl and js, with one entry per token.
    """

    against: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(FULL_CACHE), metadata={"engine": True})
    continuation: Literal["text", "greedy"] = "text"
    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    num_texts: int = int_field(4)
    prompt_tokens: int = int_field(512)
    output_tokens: int = int_field(128)
    bos: bool | None = None
    save_tokens: bool = False

    @property
    def cut(self) -> texts.ExcerptSpec:
        more = self.output_tokens if self.continuation == "text" else 0
        return texts.ExcerptSpec(self.prompt_tokens + more, self.bos)


class Divergence(BaseTask):
    """The task `divergence`. See the module's docstring."""

    Settings = DivergenceSettings
    measures_speed = False
    samples = "texts"

    def max_model_len(self, settings: DivergenceSettings) -> int:
        return settings.prompt_tokens + settings.output_tokens + 1

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = DivergenceSettings(**config["settings"])
        return 4 * settings.num_texts * (settings.prompt_tokens + settings.output_tokens)  # decoded and read, by both

    def num_samples(self, config: Mapping[str, Any]) -> int:
        return config["settings"]["num_texts"]

    def check(self, config: Mapping[str, Any]) -> None:
        settings = DivergenceSettings(**config["settings"])
        check_against(config, settings.against)
        eviction = read_eviction(config["engine"]["kv_eviction"])
        if eviction is not None and eviction.needs_full_text:
            raise ConfigError("engine.kv_eviction must know the text beforehand: use the task perplexity")
        texts.check_config(config, settings.num_texts, settings.cut, "settings.num_texts")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = DivergenceSettings(**trial.config["settings"]), trial.llm
        drawn = texts.draw_excerpts(settings.texts, llm.tokenizer, settings.num_texts, settings.cut, trial.seed)
        reference = other_engine(trial, settings.against)
        reference.set_pattern(None)
        of_text = settings.output_tokens * llm.model_config.vocab_size * 4
        at_once = max(min(llm.config.max_num_seqs, MAX_DISTRIBUTIONS_BYTES // of_text), 1)
        saved: dict[str, list[np.ndarray]] = defaultdict(list)
        masks: dict[str, np.ndarray | None] = {}
        for begin in range(0, len(drawn), at_once):
            group = drawn[begin : begin + at_once]
            if settings.continuation == "greedy":
                group = [
                    dataclasses.replace(excerpt, ids=excerpt.ids + answer)
                    for excerpt, answer in zip(group, _answers(reference, group, settings.output_tokens), strict=True)
                ]
            found = [f(engine, group, settings) for f in (_decoded, _read) for engine in (reference, llm)]
            for excerpt, (p, _), (q, mask), *read in zip(group, *found, strict=True):
                masks[excerpt.digest] = mask
                tokens = _of_tokens(excerpt.ids[settings.prompt_tokens :], p, q, *read)
                yield {
                    "metric": "divergence",
                    "text": excerpt.name,
                    "text_digest": excerpt.digest,
                    "count": len(q),
                    **{name: float(tokens[name].mean()) for name in _MEANS},
                    "reference_nll": -float(tokens["reference_logprob"].mean()),
                    "apart": float(np.abs(tokens["logprob"] - tokens["read_logprob"]).max()),
                    "reference_apart": float(np.abs(tokens["reference_logprob"] - read[0]).max()),
                }
                saved["text_digest"].append(np.repeat(excerpt.digest, len(q)))
                saved["position"].append(np.arange(settings.prompt_tokens, len(excerpt.ids), dtype=np.int32))
                for name in ("token_id", "logprob", "reference_logprob", "read_logprob", "kl", "js"):
                    saved[name].append(tokens[name])
            trial.progress((begin + len(group)) / len(drawn))
        yield from kept.measured(trial, masks)
        if settings.save_tokens:
            file = trial.save("tokens", **{name: np.concatenate(parts) for name, parts in saved.items()})
            yield {"metric": "tokens", "file": file}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes kl and js, nats per token; top1, the fraction of tokens at which both have the same most probable
        one; nll and read_nll, negative log-likelihoods per token as decoded and as read; apart, the largest difference
        of a token's log-probability between decoding and reading; kept: see `kept.summarised`."""
        found = [m for m in measurements if m["metric"] == "divergence"]
        count = sum(m["count"] for m in found)
        result = {name: sum(m[name] * m["count"] for m in found) / count for name in _MEANS}
        return result | {"apart": max(m["apart"] for m in found)} | kept.summarised(measurements)

    def parts(self, measurements: Sequence[Measurement]) -> dict[str, dict[Hashable, Part]]:
        found = [m for m in measurements if m["metric"] == "divergence"]
        return {name: {m["text_digest"]: Part(m[name], m["count"]) for m in found} for name in _MEANS}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        nats = number(4)
        note = "Largest: difference of a token's log-probability between decoding and reading."
        return [
            Column("kl", "KL", nats, "min", change="above baseline"),
            Column("js", "JS", nats, "min"),
            Column("top1", "same top token, %", percent(), "max"),
            Column("nll", "NLL decoded", nats, "min", change="loss decoded"),
            Column("read_nll", "NLL read", nats, "min", change="loss read"),
            Column("apart", "largest", lambda value: f"{value:.1e}", exact=True, note=note),
            *kept.columns(rows),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        found = of_metric(rows, "divergence")
        if not found:
            return []
        num_texts, counts = len({m["text_digest"] for m in found}), sorted({m["count"] for m in found})
        said = [
            f"{num_texts} texts, {' or '.join(map(str, counts))} tokens of each decoded, the same in every row; nats "
            "per token. KL: of the reference's distributions from the row's; JS: Jensen-Shannon divergence. Read: all "
            "at once after the prompt, whose eviction comes before."
        ]
        return said + [
            f"Reference: decoding and reading differ by up to {max(m['reference_apart'] for m in found):.1e}."
        ]


def _answers(llm: LLM, group: Sequence[texts.Excerpt], count: int) -> list[list[int]]:
    """Returns the greedy continuation of each text."""
    prompts = [{"prompt_token_ids": excerpt.ids} for excerpt in group]
    outputs = llm.generate(prompts, forced(count, temperature=0.0))
    return [list(output.check().outputs[0].token_ids) for output in outputs]


def _decoded(
    llm: LLM, group: Sequence[texts.Excerpt], settings: DivergenceSettings
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Returns the log-probabilities [tokens, V] of each continuation, decoded, and the `kept_tokens`."""
    count = settings.prompt_tokens
    params = [
        SamplingParams(forced_token_ids=excerpt.ids[count:], max_tokens=None, logprobs=-1, detokenize=False)
        for excerpt in group
    ]
    outputs = llm.generate([{"prompt_token_ids": excerpt.ids[:count]} for excerpt in group], params)
    found = [output.check().outputs[0] for output in outputs]
    assert all(x.distributions is not None and len(x.distributions) == settings.output_tokens for x in found)
    return [(x.distributions, x.kept_tokens) for x in found]  # pyright: ignore[reportReturnType]


def _read(llm: LLM, group: Sequence[texts.Excerpt], settings: DivergenceSettings) -> list[np.ndarray]:
    """Returns the log-probabilities [tokens] of each continuation's own tokens, read at once."""
    count, eviction = settings.prompt_tokens, read_eviction(llm.config.kv_eviction)
    # A prompt that is evicted from as it streams has no question.
    asked = len(group[0].ids) if eviction is not None and eviction.prompts == "streamed" else count
    prompts = [{"prompt_token_ids": e.ids[:asked], "question_token_ids": e.ids[asked:]} for e in group]
    found = token_scores(llm, [{name: ids for name, ids in prompt.items() if ids} for prompt in prompts])
    return [np.array([score.logprob for score in scores[count - 1 :]]) for scores in found]


def _of_tokens(
    ids: Sequence[int], p: np.ndarray, q: np.ndarray, reference_read: np.ndarray, read: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns numbers [tokens] of a continuation. p, q: of the reference and the row, see `_decoded`."""
    kl, js = divergences(p, q)
    at = np.arange(len(ids)), np.array(ids, np.int32)
    return {
        "token_id": at[1],
        "kl": kl,
        "js": js,
        "top1": p.argmax(axis=1) == q.argmax(axis=1),
        "nll": -q[at],
        "read_nll": -read,
        "logprob": q[at],
        "reference_logprob": p[at],
        "read_logprob": read,
    }


def divergences(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Kullback-Leibler divergence of p from q, sum of p log(p / q), and their Jensen-Shannon divergence.

    Args:
      p, q: [T, V] log-probabilities.

    Returns:
      [T] each, float64, in nats.
    """
    kl, js = np.zeros(len(p)), np.zeros(len(p))
    for t, pair in enumerate(zip(p, q, strict=True)):  # one token at a time: in float64 all would take twice the memory
        a, b = (x - np.logaddexp.reduce(x) for x in (y.astype(np.float64) for y in pair))
        middle = np.logaddexp(a, b) - np.log(2)
        kl[t], js[t] = _relative(a, b), (_relative(a, middle) + _relative(b, middle)) / 2
    return kl, js


def _relative(p: np.ndarray, q: np.ndarray) -> float:
    """Returns the relative entropy of two distributions, given as log-probabilities [V]."""
    possible = p > -np.inf
    p, q = p[possible], q[possible]
    return float(np.sum(np.exp(p) * (p - q)))
