"""The lines of a recall text: names, values, filler, and facts at a given depth. Knows no tokens."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

_WORDS = (
    "name path code value line file list type key item time text size data test mode date state node table index "
    "field block count event group frame image input label level limit match order point query range reader record "
    "result scope server source stream string style target thread token trace tuple user width writer cache class "
    "client color column entry error filter format header height host handle lock loop message method number object "
    "option output owner packet page parent port prefix process queue region request root route rule sample script"
).split()

_FILLER = (
    "self.{0} = {1}.{2}\n",
    "{0} = {1}({2}, {0})\n",
    "if {0} in {1}: return {2}\n",
    "# the {0} of each {1}, not of its {2}\n",
    "{0}.append({1} + {2})\n",
    "for {0} in {1}: {2}({0})\n",
    "del {0}.{1}, {2}\n",
)


@dataclasses.dataclass(frozen=True)
class UntokenizedExample:
    """A text with its question, before it is cut into tokens.

    Args:
      lines: lines before the question, each ending in a line break.
      fact: index of the line that holds the answer; the first such line if several are needed.
      question, answer, closing: the last line in three parts; the model is asked for the second.
      num_choices: number of answers that are equally likely to a model that cannot tell which fact is asked for: the
        values in the text, or all values if the text has only one.
    """

    lines: Sequence[str]
    fact: int
    question: str
    answer: str
    num_choices: int
    closing: str = "'\n"


Writer = Callable[[int], UntokenizedExample]  # writes the text with a number of filler lines


def names(rng: random.Random) -> Iterator[str]:
    """Yields distinct variable names of two words, or of more where two are taken."""
    taken: set[str] = set()
    while True:
        name = f"{rng.choice(_WORDS)}_{rng.choice(_WORDS)}"
        while name in taken:
            name += f"_{rng.choice(_WORDS)}"
        taken.add(name)
        yield name


def digits(rng: random.Random, count: int = 4) -> str:
    """Draws a value of `count` digits."""
    return f"{rng.randrange(10**count):0{count}d}"


class Lines:
    """An endless series of lines. Line i is the same for every count."""

    def __init__(self, lines: Iterator[str]):
        self._source = lines
        self._known: list[str] = []

    def take(self, count: int) -> list[str]:
        """Returns the first `count` lines."""
        self._known += itertools.islice(self._source, max(0, count - len(self._known)))
        return self._known[:count]


def code(rng: random.Random) -> Iterator[str]:
    """Yields lines of varied code without digits."""
    while True:
        yield rng.choice(_FILLER).format(*rng.sample(_WORDS, 3))


def placed(filler: Sequence[str], facts: Sequence[tuple[float, str]]) -> tuple[list[str], int]:
    """Inserts facts, (depth, line), into filler; at equal places they keep their order.

    depth: 0 is before all filler, 1 after it.

    Returns:
      all lines, and the index of the first fact's line among them.
    """
    places = [round(depth * len(filler)) for depth, _ in facts]
    order = sorted(range(len(facts)), key=places.__getitem__)
    lines: list[str] = []
    done = first = 0
    for fact in order:
        lines += filler[done : places[fact]]
        done = places[fact]
        if fact == 0:
            first = len(lines)
        lines.append(facts[fact][1])
    return lines + list(filler[done:]), first
