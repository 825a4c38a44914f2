"""RULER's tasks that need no data set: prompts of a given length in tokens, and their score. Knows no model.

    prompt = make_prompt("niah_single_1", tokenizer, QuestionSpec(num_tokens=4096), seed=0)

A prompt is what the user says, in the model's chat template if there is one, and the beginning of the answer. Source:
RULER, arXiv:2404.06654, and the parameters of github.com/NVIDIA/RULER; `docs/use/evaluation.md` lists the differences.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.recall.example import common_length, longest
from ksana_jax.lab.recall.needles import needles
from ksana_jax.lab.recall.question import Question, QuestionSpec, Writer
from ksana_jax.lab.recall.variables import variable_tracking
from ksana_jax.lab.recall.words import common_words, frequent_words
from ksana_jax.tokenizers.base import Tokenizer
from ksana_jax.tokenizers.chat import render_chat


@dataclasses.dataclass(frozen=True)
class RulerTask:
    """A kind of question. num_answer_tokens: maximum tokens of the model's answer. options: of `generate`."""

    generate: Callable[..., Writer]
    num_answer_tokens: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def reads_text(self) -> bool:
        """True if the task needs a natural text."""
        return self.options.get("haystack") == "text"


def _niah(haystack: str, **options: Any) -> RulerTask:
    return RulerTask(needles, 128, {"haystack": haystack, **options})


RULER_TASKS: dict[str, RulerTask] = {
    "niah_single_1": _niah("noise"),
    "niah_single_2": _niah("text"),
    "niah_single_3": _niah("text", values="uuids"),
    "niah_multikey_1": _niah("text", num_keys=4),
    "niah_multikey_2": _niah("needles"),
    "niah_multikey_3": _niah("needles", keys="uuids", values="uuids"),
    "niah_multivalue": _niah("text", num_values=4),
    "niah_multiquery": _niah("text", num_keys=4, num_queries=4),
    "vt": RulerTask(variable_tracking, 30),
    "cwe": RulerTask(common_words, 120),
    "fwe": RulerTask(frequent_words, 50),
}

MAX_TOKENS = 2**24  # some hundred times the context of today's models; a prompt is held in memory

# Templates may print the date, and prompts should be the same every day.
_TODAY = datetime.datetime(2024, 7, 26)
_SLOT = "<the text of the user>"


@dataclasses.dataclass(frozen=True)
class RulerPrompt:
    """A prompt in text and tokens, what the answer has to contain, and the maximum number of its tokens.

    num_question: last tokens of the prompt, from the question on.
    """

    text: str
    ids: list[int]
    num_question: int
    answers: tuple[str, ...]
    num_answer_tokens: int


def make_prompt(
    task: str, tokenizer: Tokenizer, given: QuestionSpec, *, seed: int, chat: bool | None = None
) -> RulerPrompt:
    """Makes a prompt with as much filler as fits: prompt and answer have at most given.num_tokens tokens.

    Equal arguments give equal prompts, in every process. For a seed, keys and values are the same at every length.

    Args:
      task: a key of RULER_TASKS. given.depth is for niah tasks and vt, given.words for those that read a text.
      chat: whether the prompt has the form of the tokenizer's chat template; None uses one if there is one.

    Raises:
      ConfigError: an argument is out of range, num_tokens is too small for the text without filler, or there is no
        chat template; gives the numbers.
    """
    made = _maker(task, tokenizer, given, seed, chat)
    return longest(made, _shortest(task, made, given.num_tokens), given.num_tokens, _size)


def check_prompt(task: str, tokenizer: Tokenizer, given: QuestionSpec, *, chat: bool | None = None) -> None:
    """Checks the arguments of `make_prompt`, except for the seed, without writing a long text.

    Raises:
      ConfigError: as `make_prompt`.
    """
    _shortest(task, _maker(task, tokenizer, given, 0, chat), given.num_tokens)


def score(answer: str, expected: Sequence[str]) -> float:
    """Returns the fraction of the expected texts that an answer contains, in upper or lower case.

    Source: string_match_all in RULER, by which it scores all tasks but question answering.
    """
    return sum(text.lower() in answer.lower() for text in expected) / len(expected)


def _maker(
    task: str, tokenizer: Tokenizer, given: QuestionSpec, seed: int, chat: bool | None
) -> Callable[[int], RulerPrompt]:
    """Returns a function that makes the prompt with an amount of filler."""
    checks.require(
        checks.one_of("task", task, RULER_TASKS),
        checks.integer("num_tokens", given.num_tokens, 1, MAX_TOKENS),
        checks.integer("seed", seed, 0),
        checks.number("depth", given.depth, 0, 1, optional=True),
        error=ConfigError,
    )
    kind, encode = RULER_TASKS[task], _encoder(tokenizer, chat)
    if kind.reads_text and not given.words:
        raise ConfigError(f"{task} needs a natural text as haystack, which has no words")
    write = kind.generate(random.Random(f"{task} {seed}"), given, **kind.options)

    def made(num_filler: int) -> RulerPrompt:
        question = write(num_filler)
        return RulerPrompt(*encode(question), question.answers, kind.num_answer_tokens)

    return made


def _shortest(task: str, made: Callable[[int], RulerPrompt], num_tokens: int) -> RulerPrompt:
    """Returns the prompt without filler; raises ConfigError if it has more than num_tokens tokens with its answer."""
    if (least := _size(shortest := made(0))) > num_tokens:
        raise ConfigError(
            f"{task} has at least {least:,} tokens, {shortest.num_answer_tokens} of them for the answer; num_tokens is "
            f"{num_tokens:,}"
        )
    return shortest


def _encoder(tokenizer: Tokenizer, chat: bool | None) -> Callable[[Question], tuple[str, list[int], int]]:
    """Returns a function that converts a question to the first fields of a `RulerPrompt`."""
    if chat is None:
        chat = tokenizer.chat_template is not None or bool(tokenizer.no_template)
    if chat and tokenizer.chat_template is None:
        raise ConfigError(tokenizer.no_template or "chat is True, but the model has no chat template")
    # Rendered once: a template takes time, and limits the length of its output.
    form = render_chat(tokenizer, [{"role": "user", "content": _SLOT}], now=_TODAY) if chat else _SLOT
    before, slot, after = form.partition(_SLOT)
    if not slot or _SLOT in after:
        raise ConfigError("the chat template does not write the text of the user once and unchanged")

    def encode(question: Question) -> tuple[str, list[int], int]:
        text = before + question.text + after + question.prefix
        ids, context = (
            tokenizer.encode(said, add_special_tokens=not chat) for said in (text, before + question.context)
        )
        return text, ids, len(ids) - common_length(ids, context)

    return encode


def _size(prompt: RulerPrompt) -> int:
    return len(prompt.ids) + prompt.num_answer_tokens
