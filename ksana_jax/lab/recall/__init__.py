"""Generates recall examples: a text with facts, a question about one of them, and its answer. Pure Python, no data.

    example = recall.make_example("needle", tokenizer.encode, num_tokens=1024, seed=0, depth=0.25)

Texts look like Python source. Facts are assignments, and the last line begins one whose right side is the answer.
Reading order: `example` (lengths, ids), `kinds` (what each kind asks), `lines` (facts and filler). RULER's tasks, in
English and scored in text, are apart: `ruler` (the tasks, lengths), `question`, then `needles`, `variables`, `words`.
"""

from ksana_jax.lab.recall.example import Example, check_example, make_example
from ksana_jax.lab.recall.lines import UntokenizedExample, Writer

__all__ = ["Example", "make_example", "check_example", "UntokenizedExample", "Writer"]
