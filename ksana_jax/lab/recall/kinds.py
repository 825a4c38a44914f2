"""The kinds of recall examples: one function and one entry in KINDS each.

A kind is a function of a random generator and of options by keyword. It draws the facts and returns a writer, which
writes the text with a given number of filler lines; `make_example` finds the number that gives the wanted length.
A kind of your own has the same form, in a file of your own: name it "package.module:function".

Options that several kinds share:
  depth: place of the fact that holds the answer: 0 is the beginning of the text, 1 just before the question, and None
    draws one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.recall.lines import Lines, UntokenizedExample, Writer, code, digits, names, placed


def passkey(rng: random.Random, *, depth: float | None = None) -> Writer:
    """Asks for a number of five digits that is hidden in repeated filler.

    Source: arXiv:2305.16300, section 4.2.
    """
    at, value = _depth(rng, depth), digits(rng, 5)

    def write(num_filler: int) -> UntokenizedExample:
        lines, fact = placed(["    pass\n"] * num_filler, [(at, f"PASSKEY = '{value}'\n")])
        return UntokenizedExample(lines, fact, "PASSKEY = '", value, 10**5)

    return write


def needle(rng: random.Random, *, depth: float | None = None) -> Writer:
    """Asks for a variable that is assigned once, in varied code.

    Source: the needle-in-a-haystack test, as niah_single in RULER, arXiv:2404.06654, section 3.1.
    """
    at, name, value = _depth(rng, depth), next(names(rng)), digits(rng)
    filler = Lines(code(_child(rng)))

    def write(num_filler: int) -> UntokenizedExample:
        lines, fact = placed(filler.take(num_filler), [(at, f"{name} = '{value}'\n")])
        return UntokenizedExample(lines, fact, f"{name} = '", value, 10**4)

    return write


def key_value(rng: random.Random, *, depth: float | None = None) -> Writer:
    """Asks for one of many variables: every line assigns one.

    Source: key-value retrieval, arXiv:2307.03172, section 4.
    """
    at, drawn = _depth(rng, depth), names(rng)
    name, value, child = next(drawn), digits(rng), _child(rng)
    others = Lines(f"{other} = '{digits(child)}'\n" for other in drawn)

    def write(num_filler: int) -> UntokenizedExample:
        lines, fact = placed(others.take(num_filler), [(at, f"{name} = '{value}'\n")])
        return UntokenizedExample(lines, fact, f"{name} = '", value, num_filler + 1)

    return write


def multi_query(rng: random.Random, *, depth: float | None = None, num_facts: int = 4, num_queries: int = 2) -> Writer:
    """Asks for several of the variables that are assigned in varied code, in one question.

    num_facts: variables in the text. num_queries: how many of them are asked for, at most num_facts.

    Source: niah_multiquery in RULER, arXiv:2404.06654, section 3.1.
    """
    checks.require(
        checks.integer("num_facts", num_facts, 1, 1000),
        checks.integer("num_queries", num_queries, 1, num_facts if checks.is_integer(num_facts) else None),
        error=ConfigError,
    )
    at, filler = _depth(rng, depth), Lines(code(_child(rng)))
    facts = dict(zip(itertools.islice(names(rng), num_facts), _distinct(rng, num_facts), strict=True))
    asked = list(facts)[:num_queries]
    places = [at, *(rng.random() for _ in range(num_facts - 1))]

    def write(num_filler: int) -> UntokenizedExample:
        stated = [(place, f"{name} = '{facts[name]}'\n") for place, name in zip(places, facts, strict=True)]
        lines, fact = placed(filler.take(num_filler), stated)
        answer = "', '".join(facts[name] for name in asked)
        return UntokenizedExample(
            lines, fact, f"assert ({', '.join(asked)}) == ('", answer, math.perm(num_facts, num_queries)
        )

    return write


def variable_tracking(
    rng: random.Random, *, depth: float | None = None, num_chains: int = 2, num_hops: int = 2
) -> Writer:
    """Asks for the value of a variable that was copied from another, which was copied from another, and so on.

    num_chains: chains of copies, each with a value of its own. num_hops: copies in each. depth: place of the assignment
    that holds the value; the copies follow it at random places.

    Source: variable tracking in RULER, arXiv:2404.06654, section 3.2.
    """
    checks.require(
        checks.integer("num_chains", num_chains, 1, 1000),
        checks.integer("num_hops", num_hops, 0, 1000),
        error=ConfigError,
    )
    at, filler, drawn = _depth(rng, depth), Lines(code(_child(rng))), names(rng)
    values, facts, last = _distinct(rng, num_chains), [], ""
    for chain, value in enumerate(values):
        start = rng.random() if chain else at
        chained = list(itertools.islice(drawn, num_hops + 1))
        sources = [f"'{value}'", *chained[:-1]]
        places = sorted([start, *(rng.uniform(start, 1) for _ in range(num_hops))])
        facts += [(p, f"{name} = {source}\n") for p, name, source in zip(places, chained, sources, strict=True)]
        last = last or chained[-1]

    def write(num_filler: int) -> UntokenizedExample:
        lines, fact = placed(filler.take(num_filler), facts)
        return UntokenizedExample(lines, fact, f"assert {last} == '", values[0], num_chains)

    return write


def stream_eval(rng: random.Random, *, distance: int = 20, every: int = 10) -> Writer:
    """Asks what stood some lines back in a stream of numbered lines, with the same question answered along the way.

    distance: lines between the end of the stream and the line asked for; 1 is the line before the last. every: lines
    between two questions.

    Source: StreamEval, arXiv:2309.17453, section 4.4.
    """
    checks.require(
        checks.integer("distance", distance, 1, 10**6), checks.integer("every", every, 1, 10**6), error=ConfigError
    )
    child = _child(rng)
    values = Lines(digits(child) for _ in itertools.repeat(None))

    def write(num_filler: int) -> UntokenizedExample:
        count = num_filler + distance + 1
        given = values.take(count)
        lines, fact = [], 0
        for number, value in enumerate(given):
            fact = len(lines) if number == count - 1 - distance else fact
            lines.append(f"line_{number} = '{value}'\n")
            past = number - distance
            if past >= 0 and number % every == 0 and number < count - 1:
                lines.append(f"line_{past} = '{given[past]}'\n")
        asked = count - 1 - distance
        return UntokenizedExample(lines, fact, f"line_{asked} = '", given[asked], count)

    return write


KINDS: dict[str, Callable[..., Writer]] = {
    "passkey": passkey,
    "needle": needle,
    "key_value": key_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
    "stream_eval": stream_eval,
}


def _depth(rng: random.Random, depth: float | None) -> float:
    checks.require(checks.number("depth", depth, 0, 1, optional=True), error=ConfigError)
    drawn = rng.random()  # always, so that the rest of the text does not depend on the depth
    return drawn if depth is None else depth


def _child(rng: random.Random) -> random.Random:
    return random.Random(rng.getrandbits(64))


def _distinct(rng: random.Random, count: int) -> list[str]:
    return [f"{value:04d}" for value in rng.sample(range(10**4), count)]
