"""Distinct completions of one prompt: counted on an engine that is told when to differ, and on a real one."""

from types import SimpleNamespace

import pytest

from experiments.completions.task import Completions
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from tests.lab.runs.runs import Engines, reported

SETTINGS = {
    "prompt": "hello",
    "num_completions": 6,
    "output_tokens": 8,
    "num_others": 3,
    "other_tokens": 5,
    "texts": [],
}


class Told:
    """An engine whose completions of the prompt "hello" are given, in the order in which it is asked for them."""

    tokenizer, num_compilations = None, 0
    model_config = SimpleNamespace(vocab_size=50)

    def __init__(self, completions):
        self.completions = iter(completions)

    def clear_records(self):
        pass

    def generate(self, prompts, params):
        self.asked = list(zip(prompts, params, strict=True))
        return [self._output(prompt, one.max_tokens) for prompt, one in self.asked]

    def _output(self, prompt, count):
        tokens = next(self.completions) if prompt == "hello" else [0] * count
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])
        output.check = lambda: output
        return output


def run(completions, seed=0):
    llm = Told(completions)
    return llm, list(Completions().run(SimpleNamespace(config={"settings": SETTINGS}, seed=seed, llm=llm)))


def test_distinct_completions_are_counted_and_the_first_other_token_is_found():
    usual, other, third = [1] * 8, [1] * 5 + [2] * 3, [1] * 3 + [4] * 5
    _, measurements = run([usual, other, usual, third, usual, other])
    found = Completions().summarise(measurements)
    assert (found["distinct"], found["usual"], found["earliest"]) == (3, 0.5, 3)
    assert [m["count"] for m in measurements if m["metric"] == "completion"] == [3, 2, 1]
    assert measurements[-1]["num_output_tokens"] == 6 * 8 + sum(
        n.max_tokens for p, n in run([usual] * 6)[0].asked if p != "hello"
    )


def test_equal_completions_have_no_first_other_token():
    found = Completions().summarise(run([[1] * 8] * 6)[1])
    assert (found["distinct"], found["usual"]) == (1, 1.0) and "earliest" not in found


def test_other_requests_have_random_lengths_and_places():
    orders = []
    for seed in (0, 1):
        llm, _ = run([[1] * 8] * 6, seed)
        others = [(prompt, one) for prompt, one in llm.asked if prompt != "hello"]
        assert len(others) == 3 and all(
            1 <= len(p["prompt_token_ids"]) <= 5 >= one.max_tokens >= 1 for p, one in others
        )
        orders.append([prompt == "hello" for prompt, _ in llm.asked])
    assert orders[0] != orders[1]


@pytest.mark.usefixtures("few_shapes")
def test_an_invariant_engine_has_one_completion(tmp_path):
    engine = {"block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 32}
    settings = SETTINGS | {"num_completions": 5}
    given = {"task": "experiments.completions.task:Completions", "engine": engine, "settings": settings}
    made = reported(plan(given), tmp_path, make_llm=Engines())
    assert made.rows[0].mean("distinct") == 1
    assert any(note.startswith("5 greedy completions of one prompt") for note in made.notes)


def test_texts_that_are_too_short_for_the_others_are_named(tmp_path):
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"settings\.num_others is 3, but the texts have 0 excerpts of 5 tokens"):
        plan(
            {
                "task": "experiments.completions.task:Completions",
                "settings": SETTINGS | {"texts": [str(tmp_path / "short.txt")]},
            }
        )
