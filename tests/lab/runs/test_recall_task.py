"""The task recall: what a reader of the visible text answers is what the table says."""

import re

import numpy as np
import pytest
from fake_llm import FakeLLM

from ksana_jax.core.config import ConfigError
from ksana_jax.core.outputs import Logprob
from ksana_jax.lab.recall import make_example
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks.recall import Recall
from tests.lab.runs.runs import Engines, reported

ASSIGNED = re.compile(r"(\w+) = '(\d+)'")
ENGINE = {"block_size": 16, "max_num_batched_tokens": 4096, "max_num_seqs": 8}


class Reader(FakeLLM):
    """Answers from the assignments that the last query reads; what it does not read, it answers with question marks."""

    def _answer(self, ids, count):
        seen = self._patterns[0].visible(len(ids) - 1, np.arange(len(ids)))
        text = bytes(i for i, s in zip(ids, seen, strict=True) if s and i < 256).decode()
        question = re.findall(r"(\w+) = '$", bytes(i for i in ids if i < 256).decode())
        value = dict(ASSIGNED.findall(text)).get(question[0] if question else "", "????")
        return list(value.encode())[:count]

    def generate(self, prompts, params):
        outputs = super().generate(prompts, params[0] if isinstance(params, list) else params)
        each = params if isinstance(params, list) else [params] * len(outputs)
        for output, wanted in zip(outputs, each, strict=True):
            if wanted.prompt_logprobs is None:
                output.outputs[0].token_ids = self._answer(output.prompt_token_ids, wanted.max_tokens)
        return outputs

    def _scores(self, ids):
        prompt = ids[:-4]
        known = self._answer(prompt, 4) == ids[-4:]
        entry = Logprob(-0.5, 1) if known else Logprob(-3.0, 11)
        return [None, *({token: entry} for token in ids[1:])]


def measured(tmp_path, variants, settings, seeds=(0, 1), grid=None, model=None):
    given = {"task": "recall", "model": model, "engine": ENGINE, "settings": settings, "variants": variants}
    return reported(plan({**given, "seeds": list(seeds), "grid": grid or {}}), tmp_path / "out", make_llm=Reader)


def test_a_window_answers_only_what_it_still_sees(tmp_path, model, make_llm):
    variants = [{"name": "full", "pattern": {}}, {"name": "window", "pattern.window": 400}]
    settings = {"num_tokens": 1000, "num_examples": 3, "sweep": {"depth": [0, 0.5, 1]}}
    made = measured(tmp_path, variants, settings, model=model)
    full, window = made.rows
    assert [full.mean(f"accuracy_{depth}") for depth in (0, 0.5, 1)] == [1, 1, 1]
    assert [window.mean(f"accuracy_{depth}") for depth in (0, 0.5, 1)] == [0, 0, 1]
    assert window.mean("accuracy") == pytest.approx(1 / 3)
    # Two of three answers have -3 nats and rank 11 per token, the third -0.5 and rank 1.
    assert window.mean("logprob") == pytest.approx((-3 - 3 - 0.5) / 3)
    assert window.mean("rank") == pytest.approx((11 + 11 + 1) / 3)
    assert window.mean("chance") == 1e-4
    assert window.sd("accuracy_1") == 0
    heads = [column.title for column in made.columns]
    assert heads[:5] == ["depth 0, %", "depth 0.5, %", "depth 1, %", "all, %", "chance, %"]
    assert "'full': 100 % of answers are correct; 'window': 33 % of answers are correct" in made.conclusion
    assert "chance is 0.01 %" in made.conclusion
    held = {row.label: (row.mean("live_kv_bytes") or 0) / 1024 for row in made.rows}
    assert (
        f"with {held['window']:g} KiB of KV, {held['window'] / held['full']:.1%} of what 'full' holds"
        in made.conclusion
    )


@pytest.mark.parametrize("chunk", [16, 100, 4096])
def test_live_kv_of_a_question_does_not_depend_on_the_chunk(tmp_path, model, make_llm, chunk):
    engine = {**ENGINE, "max_num_batched_tokens": chunk}
    variants = [{"name": "full"}, {"name": "window", "pattern.window": 100}]
    given = {"task": "recall", "model": model, "engine": engine, "settings": {"num_tokens": 600, "num_examples": 1}}
    full, window = reported(plan({**given, "variants": variants}), tmp_path, make_llm=Reader).rows
    (answer,) = [m for m in full.trials[0] if m["metric"] == "answer"]
    held = answer["num_prompt_tokens"] + 3  # four tokens of answer, the last of which is not computed
    assert full.mean("live_kv_bytes") == 1024 * -(-held // 16)
    assert window.mean("live_kv_bytes") == 1024 * (-(-held // 16) - (held - 99) // 16)


def test_rows_that_were_asked_the_same_are_compared_seed_by_seed(tmp_path, model, make_llm):
    variants = [{"name": "full", "pattern": {}}, {"name": "window", "pattern.window": 400}]
    settings = {"num_tokens": 1000, "num_examples": 2}
    full, window = measured(tmp_path, variants, settings, model=model).rows
    assert full.samples["accuracy"] == window.samples["accuracy"]
    assert len(set(full.samples["accuracy"])) == 2


def drawn(made):
    from matplotlib.figure import Figure

    figure = Figure()
    Recall().draw(figure, made.rows)
    return figure.axes


def test_the_figure_over_lengths_is_a_heat_map_for_each_row(tmp_path, model, make_llm):
    variants = [{"name": "full", "pattern": {}}, {"name": "window", "pattern.window": 400}]
    settings = {"num_examples": 1, "sweep": {"depth": [0, 1]}}
    lengths = {"settings.num_tokens": [1000, 500, 2000]}
    full, window, _ = drawn(measured(tmp_path, variants, settings, grid=lengths, model=model))
    assert [full.get_title(), window.get_title()] == ["full", "window"]
    assert np.asarray(window.images[0].get_array()).tolist() == [[0, 0, 0], [100, 100, 100]]
    assert np.asarray(full.images[0].get_array()).tolist() == [[100] * 3] * 2
    assert [label.get_text() for label in window.get_xticklabels()] == ["500", "1,000", "2,000"]
    assert [label.get_text() for label in full.get_yticklabels()] == ["0", "1"]


def test_the_figure_of_one_length_is_lines_over_the_swept_option(tmp_path, model, make_llm):
    variants = [{"name": "full", "pattern": {}}, {"name": "window", "pattern.window": 300}]
    settings = {"kind": "stream_eval", "num_tokens": 1500, "num_examples": 1, "sweep": {"distance": [2, 50]}}
    made = measured(tmp_path, variants, settings, model=model)
    above, below = drawn(made)
    assert below.get_xlabel() == "distance" and above.get_ylabel() == "correct (%)"
    assert [np.asarray(line.get_ydata()).tolist() for line in above.lines if line.get_marker() == "o"] == [
        [100, 100],
        [100, 0],
    ]
    # Two lines of 17 bytes, the question's beginning, and perhaps an answered question.
    assert any(re.match(r"Tokens from the fact to the answer, by distance: [4-6]\d, 9\d\d\.", n) for n in made.notes)


def test_without_a_swept_option_there_is_one_column(tmp_path, model, make_llm):
    settings = {"num_tokens": 600, "num_examples": 2, "options": {"depth": 0.5}}
    made = measured(tmp_path, [], settings, seeds=[0], model=model)
    assert made.columns[0].title == "correct, %"
    assert made.rows[0].mean("accuracy") == 1
    assert drawn(made)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "neddle"}, "kind is 'neddle', must be one of passkey"),
        ({"sweep": {"dept": [0, 1]}}, "has no option 'dept'; the nearest is 'depth'"),
        ({"sweep": {"depth": 1}}, r"settings\.sweep\.depth is 1, must be a list of distinct values"),
        ({"sweep": {"depth": [0, 0]}}, "must be a list of distinct values"),
        ({"sweep": {"depth": [0, 2]}}, "depth is 2, must be a number from 0 to 1"),
        ({"sweep": {"depth": [0], "distance": [1]}}, r"settings\.sweep has 2 options, must have at most one"),
        ({"sweep": {"depth": [0]}, "options": {"depth": 1}}, r"settings\.options and settings\.sweep both set 'depth'"),
        ({"num_examples": 0}, r"settings\.num_examples is 0"),
        ({"num_tokens": 8}, "needle examples have at least .* tokens, num_tokens is 8"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(one_layer, settings, said):
    with pytest.raises(ConfigError, match=said):
        plan({"task": "recall", "model": one_layer, "settings": settings})


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.soak
def test_log_probabilities_are_those_of_the_dense_model(tmp_path, one_layer):
    import jax
    import jax.numpy as jnp

    from ksana_jax.loading import load_model
    from ksana_jax.models import dense_logits

    engines = Engines()
    engine = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    given = {"task": "recall", "model": one_layer, "load_format": "dummy", "engine": engine}
    settings = {"num_tokens": 120, "num_examples": 2, "sweep": {"depth": [0.5]}}
    (row,) = reported(plan({**given, "settings": settings}), tmp_path, make_llm=engines).rows
    (llm,), (config, params) = engines, load_model(one_layer, load_format="dummy")
    answers = [m for m in row.trials[0] if m["metric"] == "answer"]
    for seed, answer in enumerate(answers, start=2**32):
        example = make_example("needle", llm.tokenizer.encode, num_tokens=120, seed=seed, depth=0.5)
        ids = np.array(example.prompt_ids + example.answer_ids)
        scores = np.asarray(jax.nn.log_softmax(dense_logits(params, jnp.array(ids), config=config)), np.float64)
        rows = scores[len(example.prompt_ids) - 1 : -1]
        # float32, summed in another order than the engine's.
        wanted = rows[np.arange(len(rows)), example.answer_ids].sum()
        assert answer["logprob"] == pytest.approx(wanted, abs=1e-3)
        assert answer["ranks"] == [1 + int((r > r[t]).sum()) for r, t in zip(rows, example.answer_ids, strict=True)]
        assert answer["correct"] == (answer["ranks"] == [1] * len(rows))
    # The last token of the answer is not computed.
    held = answers[0]["num_prompt_tokens"] + len(answers[0]["ranks"]) - 1
    assert row.mean("live_kv_bytes") == -(-held // 16) * llm.block_bytes


@pytest.mark.parametrize("ask", ["with", "after"])
def test_the_question_comes_with_the_text_or_after_it(tmp_path, model, ask, monkeypatch):
    given = []
    generate = Reader.generate
    monkeypatch.setattr(
        Reader, "generate", lambda self, prompts, params: given.append(prompts) or generate(self, prompts, params)
    )
    measured(tmp_path, [], {"num_tokens": 600, "num_examples": 1, "ask": ask}, seeds=[0], model=model)
    asked, scored, kv = ([bytes(p.get("question_token_ids", ())).decode() for p in prompts] for prompts in given)
    assert asked == kv
    if ask == "with":
        assert asked == [""] and re.fullmatch(r"\w{4}", scored[0])  # the answer alone, after question and eviction
    else:
        assert re.fullmatch(r"\w+ = '", asked[0]) and scored[0][: len(asked[0])] == asked[0]
        assert re.fullmatch(r"\w{4}", scored[0][len(asked[0]) :])
