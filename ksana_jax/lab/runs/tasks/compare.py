"""Two engines, or two ways of asking one engine, that serve the same requests: speed, latency, KV memory and tokens.

The trial's engine is one side. The other side has the settings `against` instead of its own, or submits samples and
beams `apart`, so that they share no blocks. Every run has its own cache salt: requests find only blocks that the same
run has computed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.core.request import MAX_BEAM_WIDTH, MAX_N
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.models import tokenizer_of
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, TrialContext, int_field
from ksana_jax.lab.runs.tasks.paired import (
    PairedTask,
    check_against,
    of_side,
    other_engine,
    speeds,
    timed_work,
)
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    kib,
    milliseconds,
    number,
    of_metric,
    percent,
    preemption_note,
)

if TYPE_CHECKING:
    from ksana_jax import LLM, RequestOutput

METHODS = {"greedy": 1, "sample": MAX_N, "beam": MAX_BEAM_WIDTH}


@dataclasses.dataclass
class CompareSettings:
    """Fields of `settings` in a compare experiment.

    against: settings of the other side's engine where they differ, such as {enable_prefix_caching: false}; fields of
      `EngineConfig`.
    apart: the other side submits each sample or beam as a request with a cache salt of its own.
    texts: sources of the prompts: files, folders, patterns or file.jsonl#field, see `lab.runs.text_files`;
      relative to the YAML file. Empty takes the held-out texts. The seed draws among them. A model without a tokenizer
      gets random tokens.
    num_sequences: a prompt for each `width` of them, all submitted at the start.
    prompt_tokens: tokens of each prompt, BOS included.
    shared_percent: percentage of each prompt that is a shared prefix, rounded down to whole tokens.
    num_prefixes: number of different prefixes; prompt i has prefix i modulo num_prefixes.
    turns: texts that are appended before each answer; a turn sends the whole chat so far. The default asks once.
    output_tokens: tokens of each answer, regardless of EOS.
    method: "greedy", "sample", which draws `width` samples of each prompt, or "beam" with `width` beams.
    width: samples or beams of a prompt.
    num_pairs: timed runs of each side.
    """

    against: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"engine": True})
    apart: bool = False
    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    num_sequences: int = int_field(32)
    prompt_tokens: int = int_field(64)
    shared_percent: int = int_field(0, 0, 100)
    num_prefixes: int = int_field(1)
    turns: list[str] = dataclasses.field(default_factory=lambda: [""])
    output_tokens: int = int_field(32)
    method: str = "greedy"
    width: int = 1
    num_pairs: int = int_field(1)

    @property
    def num_prompts(self) -> int:
        return self.num_sequences // self.width


class Compare(PairedTask):
    """The task `compare`. See the module's docstring."""

    Settings = CompareSettings

    def max_model_len(self, settings: CompareSettings) -> int:
        # A tokenizer makes at most one token of a byte.
        return settings.prompt_tokens + sum(len(turn.encode()) + settings.output_tokens for turn in settings.turns)

    def check(self, config: Mapping[str, Any]) -> None:
        settings = CompareSettings(**config["settings"])
        checks.require(checks.one_of("settings.method", settings.method, METHODS), error=ConfigError)
        width = f"settings.width of method {settings.method}"
        checks.require(
            checks.integer(width, settings.width, 1, METHODS[settings.method]),
            checks.boolean("settings.apart", settings.apart),
            error=ConfigError,
        )
        if settings.num_sequences % settings.width:
            raise ConfigError(
                f"settings.num_sequences is {settings.num_sequences}, must be a multiple of width {settings.width}"
            )
        if not settings.against and not settings.apart:
            raise ConfigError("settings.against is empty and settings.apart false: there is nothing to compare")
        if not settings.turns or not all(isinstance(turn, str) for turn in settings.turns):
            raise ConfigError(f"settings.turns is {settings.turns!r:.80}, must be a list of at least one text")
        if any(settings.turns) and tokenizer_of(config["model"]) is None:
            raise ConfigError(f"settings.turns has text, {config['model']} has no tokenizer")
        check_against(config, settings.against)
        cut = texts.ExcerptSpec(settings.prompt_tokens)
        texts.check_config(config, settings.num_prompts, cut, "settings.num_sequences / settings.width")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = CompareSettings(**trial.config["settings"]), trial.llm
        other = other_engine(trial, settings.against) if settings.against else llm
        drawn = texts.prompts_for(llm, settings.texts, settings.num_prompts, settings.prompt_tokens, trial.seed)
        prompts = with_prefixes(drawn, settings)
        yield {"metric": "setting", **{k: v for k, v in dataclasses.asdict(settings).items() if k != "texts"}}
        serve = functools.partial(_serve, prompts, settings, trial.seed)
        yield from self.measure(
            trial, functools.partial(serve, other, settings.apart), functools.partial(serve, llm, False)
        )

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes gain, seconds against / seconds; of each side speeds, tpot_s, kv_bytes, the mean of KV held within
        a step, and hit_rate, the fraction of prompt tokens found in the cache; saved, the fraction of blocks that
        sharing saves; and same, the fraction of answers whose tokens are equal on both sides, absent if they differ by
        their seeds."""
        result = speeds(measurements)
        sides = of_side(measurements, "without"), of_side(measurements, "with")
        for side, runs in zip(("without", "with"), sides, strict=True):
            result[f"tpot_s_{side}"] = statistics.median(m["tpot_s"] for m in runs)
            result[f"kv_bytes_{side}"] = statistics.fmean(m["mean_blocks"] * m["block_bytes"] for m in runs)
            result[f"hit_rate_{side}"] = statistics.fmean(m["hit_rate"] for m in runs)
        held, unshared = (sum(m[name] for m in sides[1]) for name in ("mean_blocks", "mean_unshared"))
        result["saved"] = 1 - held / unshared
        if not next(m["apart"] for m in measurements if m["metric"] == "setting"):
            found = [a == b for pair in zip(*sides, strict=True) for a, b in zip(*(m["answers"] for m in pair))]
            result["same"] = sum(found) / len(found)
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        found = [
            Column(f"{key}_{side}", title.format(suffix), write)
            for key, title, write in (
                ("hit_rate", "prefix hits{}, %", percent()),
                ("kv_bytes", "KV held{}, KiB", kib),
                ("mean_running", "sequences at once{}", number(1)),
                ("ttft_s", "TTFT{}, ms", milliseconds()),
                ("tpot_s", "TPOT{}, ms", milliseconds()),
                ("tokens_per_s", "tokens/s{}", number(0)),
            )
            for side, suffix in (("without", " against"), ("with", ""))
        ]
        found.append(Column("gain", "gain, ×", number(2), "max"))
        if any(row.mean("same") is not None for row in rows):
            found.append(Column("same", "same answers, %", percent(), exact=True))
        if any(row.mean("saved") for row in rows):
            found.append(Column("saved", "blocks saved, %", percent(), "max"))
        return found

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        settings = of_metric(rows, "setting")
        others = {", ".join(f"{name}: {value}" for name, value in m["against"].items()) for m in settings}
        others |= {"samples or beams as requests that share nothing" for m in settings if m["apart"]}
        return [
            f"Against: {'; '.join(sorted(filter(None, others)))}.",
            "Gain: seconds against / seconds, in alternating runs, median over the pairs of a seed. Tokens/s: output "
            "tokens, time includes prompts. TTFT: mean over requests, of which all of a turn arrive at once.",
            "KV held: within a step, mean over steps. Blocks saved: of those that are held without sharing.",
            *compilation_note(rows),
            *preemption_note(rows, "num_preemptions_with"),
        ]


def with_prefixes(prompts: Sequence[list[int]], settings: CompareSettings) -> list[list[int]]:
    """Returns prompts whose first shared_percent are those of the first num_prefixes prompts in rotation."""
    shared = settings.prompt_tokens * settings.shared_percent // 100
    return [prompts[i % settings.num_prefixes][:shared] + ids[shared:] for i, ids in enumerate(prompts)]


def _serve(
    prompts: Sequence[list[int]], settings: CompareSettings, seed: int, llm: LLM, apart: bool, salt: str
) -> Measurement:
    width = 1 if apart else settings.width
    chats = [list(ids) for ids in prompts for _ in range(settings.width // width)]
    salts = [f"{salt} {i}" if apart else salt for i in range(len(chats))]
    how: dict[str, Any] = {"n": width}
    if settings.method == "greedy":
        how["temperature"] = 0.0
    elif settings.method == "beam":
        how["beam_width"] = width
    params = [forced(settings.output_tokens, seed=1000 * seed + i, **how) for i in range(len(chats))]
    turns = [llm.get_tokenizer().encode(turn, add_special_tokens=False) if turn else [] for turn in settings.turns]
    outputs: list[RequestOutput] = []

    def talk() -> list[RequestOutput]:
        for turn in turns:
            for ids in chats:
                ids += turn
            asked = zip(chats, salts, strict=True)
            answers = llm.generate([{"prompt_token_ids": list(ids), "cache_salt": of} for ids, of in asked], params)
            for ids, answer in zip(chats, answers, strict=True):
                ids += answer.outputs[0].token_ids
            outputs.extend(answers)
        return outputs

    found = timed_work(llm, talk)
    answers = [[completion.token_ids for completion in output.outputs] for output in outputs]
    return {
        **found,
        "block_bytes": llm.block_bytes,
        "tpot_s": statistics.fmean(output.metrics.tpot_s or 0.0 for output in outputs),
        "answers": [hashlib.sha256(repr(answer).encode()).hexdigest()[:16] for answer in answers],
    }
