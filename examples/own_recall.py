"""A kind of recall example in one file: on which shelf does a book stand?

  cd examples && ksana run recall settings.kind=own_recall:shelf

A kind draws a fact and returns a function that writes the text with a given number of filler lines. Lengths in tokens,
seeds, scoring, table and figure come for free. `ksana_jax.lab.recall.kinds` has more, and helpers are next to it.
"""

from __future__ import annotations

import random

from ksana_jax.lab.recall import UntokenizedExample, Writer

BOOKS = ("Middlemarch", "Dubliners", "The Odyssey", "Candide")


def shelf(rng: random.Random, *, depth: float = 0.5) -> Writer:
    """Asks for a number that one sentence states. depth: its relative place in the text, from 0 to 1."""
    book, number = rng.choice(BOOKS), rng.randrange(100, 1000)

    def write(num_filler: int) -> UntokenizedExample:
        lines = ["The library is quiet today.\n"] * num_filler
        fact = round(depth * num_filler)
        lines.insert(fact, f"{book} stands on shelf {number}.\n")
        return UntokenizedExample(lines, fact, f"{book} stands on shelf ", str(number), num_choices=900, closing=".\n")

    return write
