"""The interface of RULER's tasks: what they take, and the questions that they return. Knows no tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Question:
    """A text with a question about it.

    Args:
      context: the user's instruction and text.
      asked: the user's question after them.
      prefix: the beginning of the answer, which the model continues.
      answers: texts that a complete answer contains.
    """

    context: str
    asked: str
    prefix: str
    answers: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that the user says."""
        return self.context + self.asked


@dataclasses.dataclass(frozen=True)
class QuestionSpec:
    """Inputs of a question besides its seed.

    Args:
      num_tokens: maximum tokens of prompt and answer; some tasks are easier in short texts.
      words: a natural text, cut at white space; repeated if it is too short.
      depth: place of the fact that is asked for: 0 is the beginning, 1 the end, and None draws one.
    """

    num_tokens: int
    words: Sequence[str] = ()
    depth: float | None = None


Writer = Callable[[int], Question]  # writes the text with an amount of filler


def places(rng: random.Random, count: int, depth: float | None) -> list[float]:
    """Draws distinct depths out of 40 evenly spaced ones, as RULER does, and replaces the first if `depth` is given."""
    drawn = [place / 39 for place in rng.sample(range(40), count)]
    return drawn if depth is None else [depth, *drawn[1:]]


def numbered(words: Sequence[str]) -> str:
    """Returns words as "1. first 2. second"."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
