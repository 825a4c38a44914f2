"""Needles in a haystack: sentences that give keys their values, and a question about some of the keys."""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence

from ksana_jax.lab.recall.english import pairs
from ksana_jax.lab.recall.lines import Lines, placed
from ksana_jax.lab.recall.question import Question, QuestionSpec, Writer, places

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*$")


def needles(
    rng: random.Random,
    given: QuestionSpec,
    *,
    haystack: str,
    keys: str = "words",
    values: str = "numbers",
    num_keys: int = 1,
    num_values: int = 1,
    num_queries: int = 1,
) -> Writer:
    """Asks for the values of keys, each stated in a sentence of its own.

    Args:
      haystack: "noise" (five sentences, repeated), "needles" (sentences about other keys), or "text" (given.words).
      keys, values: "words" (pairs of English words), "numbers" (seven digits), or "uuids".
      num_keys: keys in the text, num_values: values of each, num_queries: keys that are asked for.

    Source: RULER, arXiv:2404.06654, section 3.1, and its tasks niah_*.
    """
    drawn_keys, drawn_values = _DRAW[keys](rng), _DRAW[values](rng)
    facts = {
        key: list(itertools.islice(drawn_values, num_values)) for key in list(itertools.islice(drawn_keys, num_keys))
    }
    asked = rng.sample(list(facts), num_queries)
    stated = [(key, value) for key in [*asked, *(key for key in facts if key not in asked)] for value in facts[key]]
    at = places(rng, len(stated), given.depth)
    placed_facts = [(place, _needle(values, *fact)) for place, fact in zip(at, stated, strict=True)]
    others = Lines(_needle(values, key, value) for key, value in zip(drawn_keys, drawn_values, strict=False))
    filler: Callable[[int], list[str]] = {
        "noise": lambda count: [NOISE] * count,
        "needles": others.take,
        "text": lambda count: sentences(given.words, count),
    }[haystack]
    between = " " if haystack == "text" else "\n"

    one = num_queries * num_values == 1
    what, verb = values[:-1] if one else values, "is" if one else "are"
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    begin = (
        f"{'A' if one else 'Some'} special magic {what} {verb} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {what} afterwards.\n"
    )
    end = f"\nWhat {verb}{' all' * (not one)} the special magic {what} for {query} mentioned in the provided text?"
    prefix = f" The special magic {what} for {query} mentioned in the provided text {verb}"

    def write(num_filler: int) -> Question:
        context = between.join(placed(filler(num_filler), placed_facts)[0])
        return Question(begin + context, end, prefix, tuple(value for key in asked for value in facts[key]))

    return write


def sentences(words: Sequence[str], count: int) -> list[str]:
    """Returns the sentences of the first `count` words, from the beginning again at the end of the text.

    A sentence ends with a word that ends with a full stop, an exclamation or a question mark.
    """
    found: list[str] = []
    sentence: list[str] = []
    for word in itertools.islice(itertools.cycle(words), count):
        sentence.append(word)
        if _SENTENCE_END.search(word):
            found.append(" ".join(sentence))
            sentence = []
    return [*found, " ".join(sentence)] if sentence else found


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _numbers(rng: random.Random) -> Iterator[str]:
    return _distinct(lambda: str(rng.randrange(10**6, 10**7)))


def _uuids(rng: random.Random) -> Iterator[str]:
    return _distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def _distinct(draw: Callable[[], str]) -> Iterator[str]:
    taken: set[str] = set()
    while True:
        if (value := draw()) not in taken:
            taken.add(value)
            yield value


_DRAW = {"words": pairs, "numbers": _numbers, "uuids": _uuids}
