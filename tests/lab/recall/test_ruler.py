"""RULER's tasks: a reader of the prompt finds the stated answers, at the stated length and depth."""

import hashlib
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.recall.english import ADJECTIVES, NOUNS, pairs
from ksana_jax.lab.recall.needles import NOISE, _distinct, sentences
from ksana_jax.lab.recall.question import QuestionSpec
from ksana_jax.lab.recall.ruler import RULER_TASKS, make_prompt, score
from ksana_jax.tokenizers import find_tokenizer
from ksana_jax.tokenizers.base import Tokenizer

ROOT = Path(__file__).parents[3]
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
ASKED = re.compile(r"the special magic \w+ for (.+) mentioned in the provided text\?")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}<assistant>"
STORY = "It was a dark night. Nobody came! “Who is there?” he asked. The rain went on and on".split()
NIAH = [name for name in RULER_TASKS if name.startswith("niah")]
BOS = -1
# Keys, values and how many of both there are, and values asked for, as in RULER's synthetic.yaml.
FORMS = {
    "niah_single_1": ("words", "numbers", 1, 1),
    "niah_single_2": ("words", "numbers", 1, 1),
    "niah_single_3": ("words", "uuids", 1, 1),
    "niah_multikey_1": ("words", "numbers", 4, 1),
    "niah_multikey_2": ("words", "numbers", None, 1),
    "niah_multikey_3": ("uuids", "uuids", None, 1),
    "niah_multivalue": ("words", "numbers", 1, 4),
    "niah_multiquery": ("words", "numbers", 4, 4),
}
WRITTEN = {
    "words": r"[a-z]+-[a-z]+",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


class WordTokenizer(Tokenizer):
    """A token for each word or sign."""

    source = "words"

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def _encode(self, text, add_special_tokens):
        return [BOS] * add_special_tokens + [hash(piece) for piece in re.findall(r"\w+|\S", text)]

    def piece(self, token_id):
        raise NotImplementedError


PLAIN, CHAT = WordTokenizer(), WordTokenizer(TEMPLATE)


def made(task, num_tokens=1500, seed=0, tokenizer=PLAIN, chat=None, words=STORY, depth=None):
    return make_prompt(task, tokenizer, QuestionSpec(num_tokens, words, depth), seed=seed, chat=chat)


@pytest.mark.parametrize("task", RULER_TASKS)
@pytest.mark.parametrize(
    "tokenizer", [PLAIN, CHAT, find_tokenizer(ROOT / "ksana_jax/assets/ksana-tiny")], ids=["plain", "chat", "bpe"]
)
@pytest.mark.parametrize("num_tokens", [1600, 6000])
def test_prompt_and_answer_are_as_long_as_they_may_be(task, tokenizer, num_tokens):
    prompt = made(task, num_tokens, 3, tokenizer)
    assert prompt.ids == tokenizer.encode(prompt.text, add_special_tokens=tokenizer.chat_template is None)
    # A line of noise, a needle with long keys, or all repetitions of a word more would be too much.
    longest = max(len(tokenizer.encode(line)) for line in (NOISE, f"{' 1000. quiet-willow' * 3}", "0123456789ab-" * 6))
    assert num_tokens - 2 * longest < len(prompt.ids) + prompt.num_answer_tokens <= num_tokens


@pytest.mark.parametrize("task", NIAH)
@pytest.mark.parametrize("seed", range(4))
def test_needles_have_the_kinds_and_numbers_of_the_task_and_give_the_answers(task, seed):
    prompt = made(task, seed=seed, tokenizer=CHAT)
    keys, values, num_keys, num_answers = FORMS[task]
    stated = NEEDLE.findall(prompt.text)
    assert {kind for kind, _, _ in stated} == {values}
    by_key = {}
    for _, key, value in stated:
        assert re.fullmatch(WRITTEN[keys], key) and re.fullmatch(WRITTEN[values], value)
        by_key.setdefault(key, []).append(value)
    assert len(by_key) == num_keys if num_keys else len(by_key) > 30
    question = prompt.text[prompt.text.rindex("What ") :]
    asked = re.split(r", and |, ", ASKED.findall(question)[0])
    assert sorted(value for key in asked for value in by_key[key]) == sorted(prompt.answers)
    assert len(prompt.answers) == num_answers
    assert all(prompt.text.count(answer) == 1 for answer in prompt.answers)
    assert (f"What is the special magic {values[:-1]} " in question) == (num_answers == 1)
    verb = "is" if num_answers == 1 else "are"
    assert prompt.text.endswith(f" mentioned in the provided text?</><assistant>{_prefix(question, verb)}")


def _prefix(question, verb):
    what, query = re.findall(r"the special magic (\w+) for (.+) mentioned in the provided text\?", question)[0]
    return f" The special magic {what} for {query} mentioned in the provided text {verb}"


@pytest.mark.parametrize("task", NIAH)
def test_between_needles_stands_the_haystack_in_its_order(task):
    prompt = made(task, 2500)
    context = prompt.text[prompt.text.index("afterwards.\n") + 12 : prompt.text.rindex("\nWhat ")]
    rest = " ".join(NEEDLE.sub(" ", context).split()).split()
    repeated = {"noise": NOISE.split(), "text": STORY, "needles": [None]}[RULER_TASKS[task].options["haystack"]]
    assert rest == [word for word, _ in zip(itertools.cycle(repeated), rest, strict=False)]
    assert len(rest) > 1500 or "multikey_" in task


@pytest.mark.parametrize("task", [*NIAH, "vt"])
@pytest.mark.parametrize("depth", [0, 0.3, 1.0])
def test_the_fact_stands_at_its_depth(task, depth):
    prompt = made(task, 6000, 1, depth=depth)
    begin = prompt.text.rindex("following text." if task == "vt" else "afterwards.\n")
    context = prompt.text[begin : prompt.text.rindex("\nQuestion" if task == "vt" else "\nWhat ")]
    fact = f"VAR {prompt.answers[0]} = " if task == "vt" else f" is: {prompt.answers[0]}."
    assert abs(context.index(fact) / len(context) - depth) < 0.03


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [None, 0.5])
def test_all_variables_that_hold_the_value_are_the_answer(seed, depth):
    prompt = made("vt", seed=seed, depth=depth)
    solved, text = prompt.text.split("\n\nMemorize ")
    for part, expected in ((solved, solved.split()[-5:]), (text, prompt.answers)):
        held, last = {}, ""
        for name, source in re.findall(r"VAR (\w+) = (.+)", part):
            assert not last or source == f"VAR {last}"
            held[name], last = held[last] if last else source, name
        (value,) = re.findall(r"assigned the value (\d{5}) in the text", part)
        assert [name for name in held if held[name] == value] == list(expected)
        assert len(set(expected)) == 5
    assert prompt.text.endswith(f"text above, 5 variables are assigned the value {value}, they are: ")
    assert {len(name) for name in prompt.answers} == {5}


@pytest.mark.parametrize(("num_tokens", "counts"), [(1500, (6, 1)), (5000, (30, 3)), (30_000, (30, 3))])
@pytest.mark.parametrize("seed", range(2))
def test_ten_common_words_are_repeated_more_than_all_others(num_tokens, counts, seed):
    prompt = made("cwe", num_tokens, seed)
    solved, text = prompt.text.rsplit("Below is", 1)
    listed = Counter(re.findall(r"\d+\. ([a-z-]+)", text))
    assert {word for word, count in listed.items() if count == counts[0]} == set(prompt.answers)
    assert len(prompt.answers) == 10 and set(listed.values()) == set(counts)
    before, given = solved.split("in the list are:")
    example = Counter(re.findall(r"\d+\. ([a-z-]+)", before))
    assert {word for word, _ in example.most_common(10)} == set(re.findall(r"[a-z]+", given))
    # A word within another would be found where it is not given.
    assert not [pair for pair in itertools.product(prompt.answers, listed) if pair[0] != pair[1] and pair[0] in pair[1]]


@pytest.mark.parametrize("num_tokens", [None, 1500, 5000])
def test_three_coded_words_are_more_frequent_than_all_others(num_tokens):
    if num_tokens is None:  # the least that is accepted, where counts are small
        num_tokens = next(n for n in range(100, 400) if accepted("fwe", n))
    for length in range(num_tokens, num_tokens + 40, 4):
        prompt = made("fwe", length, length)
        context = prompt.text[prompt.text.index("coded words. ") + 13 : prompt.text.index("\nQuestion")]
        (dots, most), *ranked = Counter(context.split()).most_common()
        assert dots == "..." and [word for word, _ in ranked[:3]] == list(prompt.answers)
        assert most > ranked[0][1] and ranked[2][1] > ranked[3][1]
        assert ranked[0][1] / most == pytest.approx(1 / 4, abs=0.05)


def accepted(task, num_tokens):
    try:
        return made(task, num_tokens)
    except ConfigError:
        return None


def test_no_english_word_is_a_part_of_another():
    words = [*ADJECTIVES, *NOUNS]
    assert len(set(words)) == len(words) > 300
    assert not [(a, b) for a, b in itertools.permutations(words, 2) if a in b]


def test_pairs_of_words_never_run_out_nor_repeat():
    drawn = list(itertools.islice(pairs(random.Random(0)), 60_000))
    assert len(set(drawn)) == 60_000 and not any(any(c.isdigit() for c in pair) for pair in drawn[:24_178])


def test_drawn_keys_and_values_are_distinct():
    assert list(itertools.islice(_distinct(iter("aabacb").__next__), 3)) == ["a", "b", "c"]


def test_sentences_are_the_words_in_order_from_the_beginning_again():
    assert sentences(STORY, 12) == ["It was a dark night.", "Nobody came!", "“Who is there?”", "he asked."]
    found = sentences(STORY, 25)
    assert " ".join(found).split() == [*STORY, *STORY][:25]
    assert sentences(STORY, 0) == []


@pytest.mark.parametrize("task", RULER_TASKS)
def test_seeds_differ_and_a_seed_has_the_same_answers_at_every_length(task):
    drawn = [made(task, seed=seed).answers for seed in range(5)]
    assert len(set(drawn)) == 5
    assert drawn == [made(task, 3000, seed).answers for seed in range(5)]


def test_prompts_are_the_same_in_every_process_and_version():
    texts = [made(task, 4096, 7).text for task in RULER_TASKS]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "446cd5bbaed8cbe1"


def test_a_chat_template_is_used_if_there_is_one_and_writes_bos_itself():
    assert made("fwe", tokenizer=CHAT) == made("fwe", tokenizer=CHAT, chat=True)
    assert made("fwe", tokenizer=CHAT, chat=False) == made("fwe")
    assert made("fwe").ids[0] == BOS and BOS not in made("fwe", tokenizer=CHAT).ids
    assert made("fwe", tokenizer=CHAT).text.startswith("<user>Read the following coded text")


def test_a_template_that_cannot_be_used_is_never_left_out_silently():
    broken = WordTokenizer()
    broken.no_template = "f: chat_template is int, must be a string"
    with pytest.raises(ConfigError, match="chat_template is int"):
        made("fwe", tokenizer=broken)
    assert made("fwe", tokenizer=broken, chat=False) == made("fwe")


def test_a_template_that_prints_the_date_gives_the_same_prompt_every_day():
    dated = WordTokenizer("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    assert made("vt", tokenizer=dated).text.startswith("26 Jul 2024 Memorize")


@pytest.mark.parametrize(
    ("answer", "expected", "found"),
    [
        ("The numbers are 1234567 and 7654321.", ("1234567", "7654321"), 1.0),
        ("The numbers are 1234567 and 765432.", ("1234567", "7654321"), 0.5),
        ("abcde ABXYZ", ("ABCDE", "ABXYZ", "QQQQQ", "WWWWW"), 0.5),
        ("", ("a",), 0.0),
    ],
)
def test_the_score_is_the_fraction_of_expected_texts_in_upper_or_lower_case(answer, expected, found):
    assert score(answer, expected) == found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "niah"}, r"task is 'niah', must be one of niah_single_1, niah_single_2"),
        (
            {"num_tokens": 150},
            r"niah_single_1 has at least 1\d\d tokens, 128 of them for the answer; num_tokens is 150",
        ),
        ({"num_tokens": "9"}, r"num_tokens is '9', must be an integer from 1"),
        ({"seed": -1}, r"seed is -1, must be an integer from 0"),
        ({"depth": 1.5}, r"depth is 1\.5, must be a number from 0 to 1 or None"),
        ({"task": "niah_single_2", "words": ()}, "niah_single_2 needs a natural text as haystack"),
        ({"chat": True}, "chat is True, but the model has no chat template"),
        ({"tokenizer": WordTokenizer("hello")}, "does not write the text of the user once and unchanged"),
        ({"tokenizer": WordTokenizer("{{ messages[0].content | upper }}")}, "does not write the text of the user"),
        ({"tokenizer": WordTokenizer("{{ messages[0].content * 2 }}")}, "does not write the text of the user"),
    ],
)
def test_bad_input_is_refused_with_the_numbers(settings, said):
    with pytest.raises(ConfigError, match=said):
        made(**{"task": "niah_single_1", **settings})
