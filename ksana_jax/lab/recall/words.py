"""Aggregation: lists of words, and a question about the most frequent of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import string

from ksana_jax.lab.recall.english import ADJECTIVES, NOUNS, pairs
from ksana_jax.lab.recall.lines import Lines
from ksana_jax.lab.recall.question import Question, QuestionSpec, Writer, numbered

_NUM_COMMON = 10
# Fewer words in coded text, and its third and fourth word would occur equally often.
_LEAST_CODED = 53


def common_words(rng: random.Random, given: QuestionSpec) -> Writer:
    """Asks for the ten words that a numbered list repeats most, after a solved example.

    In texts of at least 4,096 tokens, they occur 30 times and all others 3 times; in shorter ones, 6 times and once.
    Once all English words are used, the rest are pairs of them.

    Source: RULER, arXiv:2404.06654, section 3.3, and its task cwe.
    """
    singles = [*ADJECTIVES, *NOUNS]
    long = given.num_tokens >= 4096
    solved = _list(rng.sample(singles, 40), 10, 3, 0) if long else _list(rng.sample(singles, 20), 3, 1, 0)
    example = f"{solved.text}{solved.prefix} {numbered(solved.answers)}\n"
    rng.shuffle(singles)
    order, drawn = rng.getrandbits(64), pairs(random.Random(rng.getrandbits(64)))
    # An answer in a pair would be found in answers that give the pair.
    others = (pair for pair in drawn if not set(pair.split("-")) & set(singles[:_NUM_COMMON]))
    listed = Lines(itertools.chain(singles, others))

    def write(num_filler: int) -> Question:
        words = listed.take(_NUM_COMMON + num_filler)
        question = _list(words, 30, 3, order) if long else _list(words, 6, 1, order)
        return dataclasses.replace(question, context=example + question.context)

    return write


def _list(words: list[str], num_each: int, num_others: int, order: int) -> Question:
    listed = words[:_NUM_COMMON] * num_each + words[_NUM_COMMON:] * num_others
    random.Random(order).shuffle(listed)
    context = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        f"that appear most often.\n{numbered(listed)}\n"
    )
    asked = "Question: What are the 10 most common words in the above list?"
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    return Question(context, asked, prefix, tuple(words[:_NUM_COMMON]))


def frequent_words(rng: random.Random, given: QuestionSpec) -> Writer:
    """Asks for the three most frequent words of a coded text, whose frequencies fall with the square of their rank.

    Dots have the first rank and are no answer.

    Source: RULER, arXiv:2404.06654, section 3.3, and its task fwe with alpha 2.
    """
    coded: dict[str, None] = {}
    while len(coded) < max(given.num_tokens // 50 - 2, 4):  # 50 tokens are for the answer, one rank for the dots
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    vocabulary, order = ["...", *coded], rng.getrandbits(64)

    def write(num_filler: int) -> Question:
        total = (_LEAST_CODED + num_filler) / (math.pi**2 / 6)  # over the sum of 1 / rank^2
        text = [word for rank, word in enumerate(vocabulary, start=1) for _ in range(int(total / rank**2))]
        random.Random(order).shuffle(text)
        context = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(text)}\n"
        )
        asked = (
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?"
        )
        prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
        return Question(context, asked, prefix, tuple(vocabulary[1:4]))

    return write
