"""Makes recall examples of a given length in tokens. Knows how to encode text, no model."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of, nearest, resolve
from ksana_jax.lab.recall.kinds import KINDS
from ksana_jax.lab.recall.lines import UntokenizedExample, Writer

Encode = Callable[[str], list[int]]
Kind = str | Callable[..., Writer]
T = TypeVar("T")

_SAMPLE = 16  # lines of filler from which tokens per line are estimated


@dataclasses.dataclass(frozen=True)
class Example:
    """A question about a text, and its answer.

    Args:
      prompt, answer, closing: texts; the closing ends the answer's line.
      prompt_ids, answer_ids: tokens, as in the encoded whole text. A token across the border belongs to the answer.
      num_question: last tokens of the prompt, which begin after the text and ask about it.
      distance: tokens from the end of the fact's line to the answer.
      chance: accuracy of a guess among the answers that the text leaves possible; see `UntokenizedExample.num_choices`.
    """

    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]
    distance: int
    chance: float
    closing: str
    num_question: int

    @property
    def text(self) -> str:
        """The whole text, to train on: prompt, answer, and the end of its line."""
        return self.prompt + self.answer + self.closing


def make_example(kind: Kind, encode: Encode, *, num_tokens: int, seed: int, **options: Any) -> Example:
    """Makes an example of at most num_tokens tokens, prompt and answer together, with as much filler as fits.

    Equal arguments give equal examples, in every process. For a seed, facts, names and values are the same at every
    length and depth.

    Args:
      kind: a key of KINDS, "package.module:function", or a function with the interface of those in `recall.kinds`.
      encode: converts text to ids; includes the beginning-of-text token if the model needs one.
      options: the kind's, such as depth.

    Raises:
      ConfigError: no such kind or option, an option is out of range, or num_tokens is too small for the text without
        filler; gives the numbers.
    """
    checks.require(checks.integer("seed", seed, 0), error=ConfigError)
    write = _writer(kind, seed, options)
    shortest = _shortest(kind, write, encode, num_tokens)
    return longest(lambda num_filler: _cut(write(num_filler), encode), shortest, num_tokens, _size)


def check_example(kind: Kind, encode: Encode | None, *, num_tokens: int, **options: Any) -> None:
    """Checks the arguments of `make_example`, except for the seed, without writing a long text.

    Args:
      encode: None skips the check of the shortest text's length.

    Raises:
      ConfigError: as `make_example`.
    """
    checks.require(checks.integer("num_tokens", num_tokens, 1), error=ConfigError)
    write = _writer(kind, 0, options)
    if encode is not None:
        _shortest(kind, write, encode, num_tokens)


def _writer(kind: Kind, seed: int, options: Mapping[str, Any]) -> Writer:
    function = resolve(kind, KINDS, "kind")
    known = list(inspect.signature(function).parameters)[1:]
    for option in options:
        if option not in known:
            close = nearest(str(option), known, cutoff=0.0)
            hint = f"; the nearest is {close!r}" if close else "; it has none"
            raise ConfigError(f"kind {name_of(kind)!r} has no option {option!r:.60}{hint}")
    return function(random.Random(f"{name_of(kind)} {seed}"), **options)


def _shortest(kind: Kind, write: Writer, encode: Encode, num_tokens: int) -> Example:
    """Returns the example without filler; raises ConfigError if it has more than num_tokens tokens."""
    checks.require(checks.integer("num_tokens", num_tokens, 1), error=ConfigError)
    shortest = _cut(write(0), encode)
    if (least := _size(shortest)) > num_tokens:
        raise ConfigError(f"{name_of(kind)} examples have at least {least:,} tokens, num_tokens is {num_tokens:,}")
    return shortest


def _cut(draft: UntokenizedExample, encode: Encode) -> Example:
    """Encodes a text and cuts it between prompt and answer."""
    before = "".join(draft.lines[: draft.fact + 1])
    prompt = "".join(draft.lines) + draft.question
    ids = encode(prompt + draft.answer + draft.closing)
    begin = common_length(ids, encode(prompt))
    if not begin:
        raise ConfigError("the tokenizer leaves no token of the prompt before the answer")
    answered = encode(prompt + draft.answer)
    # A tokenizer may join the end of the answer with the following text; then the answer includes the end of its line.
    end = len(answered) if answered == ids[: len(answered)] else len(ids)
    asked = common_length(ids, encode("".join(draft.lines)))
    distance = begin - common_length(ids, encode(before))
    chance = 1 / draft.num_choices
    return Example(
        prompt, draft.answer, ids[:begin], ids[begin:end], distance, chance, draft.closing, max(begin - asked, 0)
    )


def common_length(a: list[int], b: list[int]) -> int:
    """Returns the length of the common prefix of two lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _size(example: Example) -> int:
    return len(example.prompt_ids) + len(example.answer_ids)


def longest(made: Callable[[int], T], shortest: T, limit: int, size: Callable[[T], int]) -> T:
    """Returns the text with the most filler whose size in tokens is at most the limit, by interpolation search.

    Args:
      made: makes the text with an amount of filler. shortest: the text without filler.
    """
    rate = max((size(made(_SAMPLE)) - size(shortest)) / _SAMPLE, 0.5)  # tokens per line of filler
    best, low, high = shortest, 0, 2 * limit + 1
    probe = int((limit - size(shortest)) / rate)
    for attempt in itertools.count():
        if high - low <= 1:
            break
        # Where lines are too uneven for estimates to converge, halving does.
        found = made(probe := min(max(probe, low + 1), high - 1) if attempt < 8 else (low + high) // 2)
        left = (limit - size(found)) / rate
        if left >= 0:
            best, low, probe = found, probe, probe + max(1, int(left))
        else:
            high, probe = probe, probe + min(-1, math.floor(left))
    return best
