"""The task ruler: what a reader of the visible text finds is what the table says."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from fake_llm import ByteTokenizer, FakeLLM

from ksana_jax.core.config import ConfigError
from ksana_jax.core.request import SamplingParams
from ksana_jax.lab.recall.question import QuestionSpec
from ksana_jax.lab.recall.ruler import RULER_TASKS, make_prompt
from ksana_jax.lab.runs import text_files
from ksana_jax.lab.runs.config import load, plan
from ksana_jax.lab.runs.report import read_report
from ksana_jax.lab.runs.run import run
from ksana_jax.lab.runs.significance import wilson
from ksana_jax.lab.runs.tasks.ruler import Ruler
from tests.lab.runs.runs import Engines, reported

ENGINE = {"block_size": 16, "max_num_batched_tokens": 4096, "max_num_seqs": 8}
NEEDLE = re.compile(r"for (\S+) is: (\S+)\.")


class Reader(FakeLLM):
    """Answers with the values that the last query reads of the keys in the question."""

    def generate(self, prompts, params):
        each = params if isinstance(params, list) else [params] * len(prompts)
        outputs = []
        for prompt, wanted in zip(prompts, each, strict=True):
            assert len(prompt["prompt_token_ids"]) + wanted.max_tokens <= self.config.max_model_len
            # It ends its answers early.
            short = SimpleNamespace(max_tokens=min(wanted.max_tokens, 8), prompt_logprobs=None)
            [output] = super().generate([prompt], short)
            output.outputs[0].text = self._answer(prompt["prompt_token_ids"])
            outputs.append(output)
        return outputs

    def _answer(self, ids):
        visible = self._patterns[0].visible(len(ids) - 1, np.arange(len(ids)))
        text, seen = (
            self.tokenizer.decode(ids),
            self.tokenizer.decode(i for i, v in zip(ids, visible, strict=True) if v),
        )
        asked = text[text.rindex("What ") :]
        return ", ".join(value for key, value in NEEDLE.findall(seen) if key in asked)


def measured(tmp_path, variants=(), settings=None, model=None, seeds=(0, 1), grid=None):
    given = {"task": "ruler", "model": model, "engine": ENGINE, "settings": settings, "variants": list(variants)}
    made = plan({**given, "seeds": list(seeds), "grid": grid or {}})
    outcome = run(made, tmp_path / "out", make_llm=Reader)  # pyright: ignore[reportArgumentType]
    assert not outcome.failed
    return read_report(tmp_path / "out")


@pytest.fixture
def story(tmp_path):
    """A folder of two texts."""
    folder = tmp_path / "story"
    folder.mkdir()
    (folder / "b.txt").write_text("Nobody came.\n\n" * 30)
    (folder / "a.txt").write_text("It was a dark night. " * 30)
    return folder


def test_a_window_answers_only_what_it_still_sees(tmp_path, model, make_llm, story):
    variants = [{"name": "full"}, {"name": "window", "pattern.window": 700}]
    settings = {"tasks": ["niah_single_1", "niah_multiquery"], "num_tokens": 2500, "num_examples": 3}
    settings |= {"haystack": [str(story)], "depth": 1.0}
    made = measured(tmp_path, variants, settings, model)
    full, window = made.rows
    assert full.mean("score") == 1 and window.mean("score_niah_single_1") == 1
    # The other three keys stand anywhere.
    assert 0.25 <= (window.mean("score_niah_multiquery") or 0) < 1
    assert window.mean("score") == pytest.approx((1 + (window.mean("score_niah_multiquery") or 0)) / 2)
    assert [column.title for column in made.columns][:3] == ["all, %", "niah_single_1, %", "niah_multiquery, %"]
    assert "Wilson's 95 % interval of a score: 0.0 is" not in (notes := "\n".join(made.notes))
    assert "; 100.0 is 61.0 to 100.0 (n = 6)." in notes
    held = {row.label: (row.mean("live_kv_bytes") or 0) / 1024 for row in made.rows}
    assert held["window"] < held["full"] and "on the same questions" in notes


def test_a_needle_before_the_window_is_lost(tmp_path, model, make_llm):
    variants = [{"name": "full"}, {"name": "window", "pattern.window": 700}]
    settings = {"tasks": ["niah_single_1"], "num_tokens": 2500, "num_examples": 1}
    made = measured(tmp_path, variants, settings, model, grid={"settings.depth": [0.0, 1.0]})
    assert [(row.label, row.point["settings.depth"], row.mean("score")) for row in made.rows] == [
        ("full", 0, 1),
        ("full", 1, 1),
        ("window", 0, 0),
        ("window", 1, 1),
    ]
    assert [column.title for column in made.columns] == ["score, %", "live KV, KiB"]


def test_records_have_the_answers_to_the_prompts_of_the_seed(tmp_path, model, make_llm):
    settings = {"tasks": ["niah_single_1"], "num_tokens": 1500, "num_examples": 2}
    made = measured(tmp_path, settings=settings, model=model)
    answers = [m for trial in made.rows[0].trials for m in trial if m["metric"] == "answer"]
    prompts = [
        make_prompt("niah_single_1", ByteTokenizer(), QuestionSpec(1500), seed=(seed << 32) + n)  # pyright: ignore[reportArgumentType]
        for seed in (0, 1)
        for n in (0, 1)
    ]
    assert [m["expected"] for m in answers] == [list(prompt.answers) for prompt in prompts]
    assert [m["answer"] for m in answers] == [prompt.answers[0] for prompt in prompts]
    assert len(set(made.rows[0].samples["score"])) == 4


def test_live_kv_is_that_of_one_prompt_and_eight_tokens(tmp_path, model, make_llm):
    settings = {"tasks": ["niah_single_1"], "num_tokens": 1500, "num_examples": 3}
    (row,) = measured(tmp_path, settings=settings, model=model, seeds=[0]).rows
    num_tokens = row.trials[0][0]["num_prompt_tokens"] + 7  # the last token is not computed
    assert row.mean("live_kv_bytes") == 1024 * -(-num_tokens // 16)


def test_the_beginning_of_the_files_in_sorted_order_is_the_haystack(tmp_path, model, make_llm, story):
    (story / "c.txt").write_text("unseen " * 10_000)
    words = ("It was a dark night. " * 30 + "Nobody came. " * 30).split() + ["unseen"] * 3000
    settings = {"tasks": ["niah_single_2"], "num_tokens": 3000, "num_examples": 1, "haystack": [f"{story}/*.txt"]}
    answers = [m for m in measured(tmp_path, settings=settings, model=model).rows[0].trials[0] if "digest" in m]
    prompt = make_prompt("niah_single_2", ByteTokenizer(), QuestionSpec(3000, words), seed=0)  # pyright: ignore[reportArgumentType]
    assert answers[0]["num_prompt_tokens"] == len(prompt.ids) and "unseen" in prompt.text


def test_changed_texts_make_other_trials_and_tasks_without_text_read_none(story):
    def inputs(task, file):
        return Ruler().inputs(Ruler.Settings(tasks=[task], haystack=[str(story / file)]))

    assert inputs("niah_single_2", "a.txt").keys() == {"haystack"}
    assert inputs("niah_single_2", "a.txt") != inputs("niah_single_2", "b.txt")
    assert inputs("niah_single_1", "a.txt") == inputs("niah_single_1", "nowhere.txt") == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"caf\xe9", r"settings\.haystack: .*odd\.txt is not UTF-8 text"),
        (b"\0\1\2" * 9, r"settings\.haystack: .*odd\.txt is not UTF-8 text: it has NUL characters"),
        (b"a word " * 300, r"settings\.haystack: .*story has 3,150 bytes, supported are at most 2,000"),
    ],
    ids=["latin-1", "binary", "huge"],
)
def test_odd_files_of_a_haystack_are_refused_in_one_line(model, story, content, said, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_BYTES", 2000)
    (story / "odd.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refusal:
        plan({"task": "ruler", "model": model, "settings": {"tasks": ["niah_single_2"], "haystack": [str(story)]}})
    assert "\n" not in str(refusal.value)


def test_files_without_words_are_no_haystack_but_may_stand_beside_others(model, story, tmp_path):
    (story / "empty.txt").write_bytes(b"")
    given = {"task": "ruler", "model": model, "settings": {"tasks": ["niah_single_2"], "haystack": [str(story)]}}
    plan(given)
    given["settings"]["haystack"] = [str(story / "empty.txt")]
    with pytest.raises(ConfigError, match=r"settings\.haystack: .*empty\.txt: no words in these files"):
        plan(given)
    given["settings"]["haystack"] = [str(tmp_path / "nowhere")]
    with pytest.raises(FileNotFoundError, match=r"settings\.haystack: .*nowhere: no such text file"):
        plan(given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tasks": ["niah"]}, r"settings\.tasks is 'niah', must be one of niah_single_1"),
        ({"tasks": []}, r"settings\.tasks is \[\], must be a list of distinct tasks"),
        ({"tasks": ["vt", "vt"]}, "must be a list of distinct tasks"),
        ({"tasks": [["vt"]]}, r"settings\.tasks is \['vt'\], must be one of niah_single_1"),
        ({"num_examples": 0}, r"settings\.num_examples is 0"),
        ({"num_tokens": 10**9}, r"settings\.num_tokens is 1,000,000,000, must be an integer from 1 to 16,777,216"),
        ({"num_tokens": 100}, r"niah_single_1 has at least \d+ tokens, 128 of them for the answer; num_tokens is 100"),
        ({"depth": -1.0}, r"depth is -1\.0, must be a number from 0 to 1 or None"),
        ({"chat": True}, "chat is True, but the model has no chat template"),
        ({"tasks": ["vt", "niah_multivalue"]}, r"settings\.haystack is empty, niah_multivalue needs a natural text"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(one_layer, settings, said):
    with pytest.raises(ConfigError, match=said):
        plan({"task": "ruler", "model": one_layer, "settings": settings})


def test_a_long_text_is_not_written_before_the_model_is_loaded(one_layer, monkeypatch):
    def refuse(*_):
        raise AssertionError("a long text")

    monkeypatch.setattr("ksana_jax.lab.recall.ruler.longest", refuse)
    assert plan({"task": "ruler", "model": one_layer, "settings": {"num_tokens": 2**20}})


def test_the_default_tasks_need_no_text():
    assert {name for name, task in RULER_TASKS.items() if task.reads_text} == {*RULER_TASKS} - {*Ruler.Settings().tasks}


def test_the_shipped_experiment_resolves():
    made = load("ruler", ["model=ksana-tiny"])
    trials = [trial.config for trial in made.trials]
    assert {config["engine"]["max_model_len"] for config in trials} == {1024, 2048}
    assert {Ruler().num_tokens(config) for config in trials} == {2 * 4 * 1024, 2 * 4 * 2048}


@pytest.mark.parametrize(("hits", "count"), [(5, 10), (0, 10), (5, 5), (1, 500)])
def test_intervals_are_those_of_wilson(hits, count):
    from scipy.stats import binomtest

    known = binomtest(hits, count).proportion_ci(method="wilson")
    assert wilson(hits / count, count) == pytest.approx((known.low, known.high), abs=1e-6)


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.filterwarnings("ignore:max_model_len")  # longer than the training context
def test_a_real_engine_is_asked_and_its_text_is_scored(tmp_path, one_layer):
    engine = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 2}
    settings = {"tasks": ["fwe"], "num_tokens": 650, "num_examples": 2}
    given = {"task": "ruler", "model": one_layer, "load_format": "dummy", "engine": engine, "settings": settings}
    engines = Engines()
    (row,) = reported(plan(given), tmp_path, make_llm=engines).rows
    *answers, _ = row.trials[0]
    for seed, answer in enumerate(answers):
        prompt = make_prompt("fwe", engines[0].tokenizer, QuestionSpec(650), seed=seed)
        (output,) = engines[0].generate(
            [{"prompt_token_ids": prompt.ids}], SamplingParams(max_tokens=50, temperature=0)
        )
        assert output.outputs[0].text == answer["answer"] != "" and answer["score"] == 0
    assert row.mean("live_kv_bytes") == -(-(answers[0]["num_prompt_tokens"] + 7) // 16) * engines[0].block_bytes


def test_the_question_may_come_after_the_text_is_compressed(tmp_path, model, monkeypatch):
    given = []
    generate = Reader.generate

    def asked(self, prompts, params):
        given.extend(prompts)
        whole = [{"prompt_token_ids": [*p["prompt_token_ids"], *p.get("question_token_ids", ())]} for p in prompts]
        return generate(self, whole, params)

    monkeypatch.setattr(Reader, "generate", asked)
    settings = {"tasks": ["niah_single_1"], "num_tokens": 1200, "num_examples": 2, "ask": "after"}
    (row,) = measured(tmp_path, settings=settings, model=model, seeds=[0]).rows
    assert row.mean("score_niah_single_1") == 1
    for prompt in given:
        text, question = (bytes(i for i in ids if i < 256).decode() for ids in prompt.values())
        assert NEEDLE.search(text) and "What " not in text
        assert question.lstrip().startswith("What is the special magic number for ") and not NEEDLE.search(question)
