"""Recall examples: what they ask has the stated answer, at the stated length, depth and distance."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.recall import UntokenizedExample, make_example
from ksana_jax.lab.recall.kinds import KINDS

ASSIGNED = re.compile(r"(\w+) = ('?)(\w+)\2")
BOS = 256
ROOT = Path(__file__).parents[3]


def encode(text):
    return [BOS, *text.encode()]


def solved(prompt):
    """The values that the last line of a prompt asks for, read from its assignments as a person would."""
    *lines, question = prompt.split("\n")
    values = {}
    for line in lines:
        if found := ASSIGNED.fullmatch(line):
            name, quote, value = found.groups()
            assert quote or value in values, f"{line} copies what is not assigned yet"
            values[name] = value if quote else values[value]
    asked = question.removeprefix("assert ").partition("=")[0].strip(" ()")
    return [values[name] for name in asked.split(", ")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_follows_from_the_text(kind, seed):
    example = make_example(kind, encode, num_tokens=1500, seed=seed)
    assert example.answer == "', '".join(solved(example.prompt))
    assert example.prompt_ids + example.answer_ids == encode(example.prompt + example.answer)
    assert example.text.endswith(f"{example.answer}'\n")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [700, 1500, 6000])
def test_an_example_is_as_long_as_it_may_be(kind, num_tokens):
    example = make_example(kind, encode, num_tokens=num_tokens, seed=5)
    longest = 1 + max(len(line) for line in example.prompt.split("\n"))
    # A longer stream may have an answered question more.
    longest *= 2 if kind == "stream_eval" else 1
    assert num_tokens - longest < len(example.prompt_ids) + len(example.answer_ids) <= num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_differ_and_a_seed_has_the_same_answer_at_every_length(kind):
    made = [make_example(kind, encode, num_tokens=1500, seed=seed) for seed in range(5)]
    assert len({example.answer for example in made}) == 5
    if kind != "stream_eval":  # its last lines depend on the length
        longer = [make_example(kind, encode, num_tokens=3000, seed=seed) for seed in range(5)]
        assert [example.answer for example in longer] == [example.answer for example in made]


def test_examples_are_the_same_in_every_process():
    made = "print(repr([make_example(kind, encode, num_tokens=999, seed=7).text for kind in KINDS]))"
    program = f"from tests.lab.recall.test_recall import *; {made}"
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    here = repr([make_example(kind, encode, num_tokens=999, seed=7).text for kind in KINDS])
    assert said.stdout.strip() == here


def test_texts_are_those_that_recorded_runs_asked_about():
    seeds = (0, 1, (1 << 32) + 3)
    made = [make_example(kind, encode, num_tokens=n, seed=s) for kind in KINDS for n in (700, 1500) for s in seeds]
    # num_question came later.
    said = re.sub(r", num_question=\d+", "", repr(made))
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "49cef111b300363a"


@pytest.mark.parametrize("kind", KINDS)
def test_the_question_begins_after_the_text(kind):
    example = make_example(kind, encode, num_tokens=700, seed=1)
    split = len(example.prompt_ids) - example.num_question
    assert bytes(example.prompt_ids[1:split]).endswith(b"\n")
    question = bytes(example.prompt_ids[split:]).decode()
    assert example.prompt.endswith(question) and "\n" not in question.rstrip("\n")
    assert example.answer not in question


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"stream_eval"}))
@pytest.mark.parametrize("depth", [0, 0.25, 1.0])
def test_the_fact_stands_at_its_depth(kind, depth):
    example = make_example(kind, encode, num_tokens=8000, seed=1, depth=depth)
    value = example.answer.partition("'")[0]
    place = example.prompt.index(f"'{value}'")
    line_end = example.prompt.index("\n", place) + 1
    assert example.distance == len(example.prompt) - line_end
    assert abs(place / len(example.prompt) - depth) < 0.03


@pytest.mark.parametrize(("distance", "every"), [(1, 10), (20, 10), (30, 7)])
def test_a_stream_asks_for_the_line_that_stood_so_far_back(distance, every):
    example = make_example("stream_eval", encode, num_tokens=2500, seed=2, distance=distance, every=every)
    numbers = [int(n) for n in re.findall(r"line_(\d+) = '", example.prompt)]
    last = max(numbers)
    assert numbers[-1] == last - distance
    # Every line stands once as a fact; besides, lines at multiples of `every` are followed by an answered question.
    questions = [n - distance for n in range(last) if n % every == 0 and n >= distance]
    assert sorted(numbers) == sorted([*range(last + 1), *questions, last - distance])


def test_chance_is_that_of_a_guess_among_what_the_text_leaves_possible():
    def chance(kind, **options):
        return make_example(kind, encode, num_tokens=2000, seed=0, **options).chance

    pairs = make_example("key_value", encode, num_tokens=2000, seed=0)
    assert pairs.chance == 1 / pairs.prompt.count("\n")
    assert chance("passkey") == 1e-5 and chance("needle") == 1e-4
    assert chance("multi_query", num_facts=5, num_queries=2) == 1 / 20
    assert chance("variable_tracking", num_chains=3) == 1 / 3


def test_a_token_across_the_border_belongs_to_the_answer():
    pieces = re.compile(r"'\d|\d'|.|\n")  # joins a digit with the quote before it or after it

    def joining(text):
        return [hash(piece) for piece in pieces.findall(text)]

    example = make_example("needle", joining, num_tokens=600, seed=0)
    whole = joining(example.text)
    assert example.prompt_ids + example.answer_ids == whole
    # '2 6 1 5' and the line break: the opening quote is asked for as well.
    assert len(example.answer_ids) == 5
    assert whole[: len(example.prompt_ids)] == joining(example.prompt[:-1])


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("neddle", {}, r"kind is 'neddle', must be one of passkey, needle"),
        ("needle", {"dept": 0.5}, r"kind 'needle' has no option 'dept'; the nearest is 'depth'"),
        ("stream_eval", {"depth": 0.5}, r"kind 'stream_eval' has no option 'depth'"),
        ("needle", {"depth": 1.5}, r"depth is 1\.5, must be a number from 0 to 1"),
        ("needle", {"depth": float("nan")}, r"depth is nan"),
        ("needle", {"num_tokens": 9}, r"needle examples have at least \d+ tokens, num_tokens is 9"),
        ("needle", {"num_tokens": True}, r"num_tokens is True, must be an integer"),
        ("needle", {"seed": -1}, r"seed is -1"),
        ("stream_eval", {"distance": 0}, r"distance is 0, must be an integer from 1"),
        ("stream_eval", {"distance": 500}, r"stream_eval examples have at least 8,\d+ tokens, num_tokens is 999"),
        ("multi_query", {"num_facts": 2, "num_queries": 3}, r"num_queries is 3, must be an integer from 1 to 2"),
        ("multi_query", {"num_facts": "2"}, r"num_facts is '2', must be an integer"),
        ("variable_tracking", {"num_chains": 0}, r"num_chains is 0"),
    ],
)
def test_bad_input_is_refused_with_the_numbers(kind, settings, said):
    with pytest.raises(ConfigError, match=said):
        make_example(kind, encode, **{"num_tokens": 999, "seed": 0, **settings})


def colours(rng):
    """A kind without filler."""
    colour = rng.choice(["red", "green", "blue"])

    def write(num_filler):
        return UntokenizedExample([f"sky = '{colour}'\n"], 0, "sky = '", colour, 3)

    return write


def test_a_kind_may_be_a_function_and_have_no_filler():
    mine = make_example(colours, encode, num_tokens=200, seed=3)
    assert mine.answer in ("red", "green", "blue") and mine.chance == 1 / 3
    assert mine.prompt.count("\n") == 1


def test_the_example_of_a_kind_in_a_file_of_its_own_states_the_shelf(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for depth in (0, 0.5, 1):
        example = make_example("own_recall:shelf", encode, num_tokens=1000, seed=3, depth=depth)
        assert f"shelf {example.answer}.\n" in example.prompt and example.text.endswith(f"{example.answer}.\n")
        assert 960 < len(encode(example.prompt + example.answer)) <= 1000
