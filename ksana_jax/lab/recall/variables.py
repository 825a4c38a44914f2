"""Variable tracking: a value that is copied from variable to variable in noise, and a question about all of them."""

from __future__ import annotations

import dataclasses
import random
import string

from ksana_jax.lab.recall.lines import placed
from ksana_jax.lab.recall.needles import NOISE
from ksana_jax.lab.recall.question import Question, QuestionSpec, Writer, places

_EXAMPLE_NOISE = 15  # lines of noise in the solved example: about 500 tokens, as RULER's


def variable_tracking(rng: random.Random, given: QuestionSpec, *, num_hops: int = 4) -> Writer:
    """Asks for the variables that hold a value, after a solved example with shorter names.

    num_hops: copies of the first variable, each of the one before it.

    Source: RULER, arXiv:2404.06654, section 3.2, and its task vt with one chain.
    """
    solved = _write(_EXAMPLE_NOISE, *_chain(rng, num_hops, 3, None))
    example = f"{solved.text}{solved.prefix}{' '.join(solved.answers)}\n\n"
    chain = _chain(rng, num_hops, 5, given.depth)

    def write(num_filler: int) -> Question:
        question = _write(num_filler, *chain)
        return dataclasses.replace(question, context=example + question.context)

    return write


def _chain(rng: random.Random, num_hops: int, num_letters: int, depth: float | None) -> tuple[str, list[str], list]:
    """Returns the value, the variables, and their assignments with a depth each, in order."""
    names: dict[str, None] = {}
    while len(names) <= num_hops:
        names["".join(rng.choices(string.ascii_uppercase, k=num_letters))] = None
    value, variables = str(rng.randrange(10_000, 100_000)), list(names)
    at = sorted(places(rng, len(variables), None))
    if depth is not None:
        at = [depth + (1 - depth) * place for place in [0.0, *at[1:]]]
    sources = [value, *(f"VAR {name}" for name in variables)]
    lines = [f"VAR {name} = {source}" for name, source in zip(variables, sources, strict=False)]
    return value, variables, list(zip(at, lines, strict=True))


def _write(num_noise: int, value: str, variables: list[str], facts: list[tuple[float, str]]) -> Question:
    context = "\n".join(placed([NOISE] * num_noise, facts)[0])
    text = f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    asked = f"Question: Find all variables that are assigned the value {value} in the text above."
    prefix = (
        f" Answer: According to the chain(s) of variable assignment in the text above, {len(variables)} variables are "
        f"assigned the value {value}, they are: "
    )
    return Question(text, asked, prefix, tuple(variables))
