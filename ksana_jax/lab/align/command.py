"""`ksana align`: compares and prints two sides, each an engine or a file of log-probabilities."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.align import scores
from ksana_jax.lab.align.scores import Scores

if TYPE_CHECKING:
    from ksana_jax import LLM
    from ksana_jax.lab.align.operators import ComparedOperator

# Tokens of the text on which operators are compared one by one: inputs and outputs of each are kept.
OPERATOR_TOKENS = 32


class TextSet(NamedTuple):
    """Prompts to continue: number, length, tokens to generate, and the seed that draws them."""

    num_prompts: int
    prompt_tokens: int
    num_tokens: int
    seed: int


def open_side(given: str, model: str) -> LLM | Scores:
    """Returns the engine or the log-probabilities that one side names: a .json file of `scores`, or settings; see
    `side_settings`."""
    from ksana_jax import LLM

    if given.endswith(".json"):
        return scores.read(Path(given))
    name, settings = side_settings(given, model)
    return LLM(name, **settings)


def side_settings(given: str, model: str) -> tuple[str, dict[str, Any]]:
    """Returns a model and the settings of an engine.

    Args:
      given: a .yaml file of settings; or settings as key=value, separated by spaces; "-" for none. The key `model`
        replaces `model`.

    Raises:
      ConfigError: the file does not exist, or is not YAML.
    """
    from ksana_jax.lab.runs.dotted import dotlist, from_yaml

    if given.endswith((".yaml", ".yml")):
        settings = from_yaml(Path(given).read_text(encoding="utf-8"))
    else:
        settings = {} if given.strip() in ("", "-") else dotlist(given.split())
    return settings.pop("model", model), settings


def draw_prompts(llm: LLM, texts: TextSet) -> list[list[int]]:
    """Cuts held-out texts into prompts; draws random tokens for a model without a tokenizer."""
    from ksana_jax.lab.runs.texts import prompts_for

    return prompts_for(llm, [], texts.num_prompts, texts.prompt_tokens, texts.seed)


def align(a: LLM | Scores, b: LLM | Scores, texts: TextSet) -> dict[str, Any]:
    """Compares two sides on the same texts: a file's if a side is one, otherwise `a`'s output.

    Returns:
      tokens: of each text whose greedy tokens differ the first that does. logprobs: see `scores.differences`.
      operators: see `operators.compare_operators`, and starts_at, the first with a difference of its own; both empty
      where a side is a file, or its operators are divided among devices; `divided` is their number.
    """
    given = a if isinstance(a, Scores) else b if isinstance(b, Scores) else None
    if given is None:
        assert not isinstance(a, Scores)
        given = scores.of_engine(a, draw_prompts(a, texts), texts.num_tokens)
    left, right = (_of(side, given) for side in (a, b))
    operators: list[ComparedOperator] = []
    engines = [side for side in (a, b) if not isinstance(side, Scores)]
    divided = max((llm.config.tensor_parallel_size for llm in engines), default=1)
    if not isinstance(a, Scores) and not isinstance(b, Scores) and divided == 1:
        from ksana_jax.lab.align.operators import compare_operators

        operators = compare_operators(a, b, given.token_ids[0][:OPERATOR_TOKENS])
    return {
        "num_texts": len(given.token_ids),
        "tokens": scores.first_other_tokens(dataclasses.replace(given, token_ids=left[0]), right[0]),
        "logprobs": scores.differences(left[1], right[1]),
        "operators": [operator._asdict() for operator in operators],
        "divided": divided if divided > 1 else None,
        "starts_at": next((o.name for o in operators if o.own or o.before), None),
    }


def _of(side: LLM | Scores, given: Scores) -> tuple[list[list[int]], list[np.ndarray]]:
    """Returns a side's continuations of the given prompts, and its log-probabilities of the given texts."""
    if side is given:
        return given.token_ids, given.logprobs
    if isinstance(side, Scores):
        if side.token_ids != given.token_ids:
            raise ConfigError("the two files hold log-probabilities of different sequences")
        return side.token_ids, side.logprobs
    counts = [len(ids) - n for ids, n in zip(given.token_ids, given.num_prompt_tokens, strict=True)]
    return scores.generated(side, given.prompts(), counts), scores.scored(side, given.token_ids)


def report(found: dict[str, Any]) -> list[str]:
    """Describes a result of `align` in lines of text, without the table of operators."""
    tokens, logprobs, first = found["tokens"], found["logprobs"], found["logprobs"]["first"]
    lines = [f"all {found['num_texts']} sequences have the same greedy tokens"]
    if tokens:
        text, at = min(tokens.items(), key=lambda item: item[1])
        others = f"{len(tokens)} of {found['num_texts']} sequences have other greedy tokens"
        lines = [f"{others}; the first, of sequence {text}, is output token {at}"]
    lines.append(f"{logprobs['identical']:,} of {logprobs['count']:,} log-probabilities have the same bits")
    if first is not None:
        quantiles = ", ".join(f"{q} {x:.2g}" for q, x in logprobs["quantiles"].items())
        lines.append(
            f"the first that differs is that of token {first['token']} of sequence {first['text']}: {first['a']:.7g} "
            f"and {first['b']:.7g}"
        )
        lines.append(f"absolute differences by quantile: {quantiles}; mean of B - A: {logprobs['mean']:.2g}")
    if found["operators"]:
        start = next((o for o in found["operators"] if o["own"] or o["before"]), None)
        what = "" if start is None else f"what comes before {start['name']}" if start["before"] else start["name"]
        lines.append(f"the first operator that differs is {what}" if what else "no operator differs")
    if found["divided"]:
        lines.append(f"operators are not compared one by one: {found['divided']} devices have a part of each")
    return lines


def operator_rows(operators: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns rows of a table: for each kind of operator the layer with the largest difference of its own."""
    worst: dict[str, dict[str, Any]] = {}
    for operator in operators:
        kind = operator["name"].rpartition(".")[2]
        if kind not in worst or operator["own"] > worst[kind]["own"]:
            worst[kind] = operator
    return [[o["name"], *(f"{o[k]:.1e}" if o[k] else "0" for k in ("own", "before", "total"))] for o in worst.values()]


def align_and_show(
    a: str, b: str | None, model: str, texts: TextSet, out: Path | None, threshold: float | None, as_json: bool
) -> int:
    """Compares two sides, or writes the log-probabilities of one; returns the exit code, see `cli.aligning`."""
    from rich.console import Console

    from ksana_jax.lab.runs.tables import terminal_grid

    left = open_side(a, model)
    if b is None:
        if out is None or isinstance(left, Scores):
            raise ConfigError("one side alone must be an engine, whose log-probabilities --out FILE.json writes")
        scores.of_engine(left, draw_prompts(left, texts), texts.num_tokens).write(out)
        print(f"{out}: {texts.num_prompts} sequences")
        return 0
    found = align(left, open_side(b, model), texts)
    print("\n".join(report(found)))
    if rows := operator_rows(found["operators"]):
        heads = ["largest of its kind", "own", "before it", "added up"]
        Console().print(terminal_grid(heads, rows, [[False] * 4] * len(rows), 3))
    if as_json:
        print(json.dumps({"a": a, "b": b, **found}))
    return int(threshold is not None and found["logprobs"]["quantiles"]["1"] > threshold)
