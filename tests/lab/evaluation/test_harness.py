"""The model "ksana" in lm-evaluation-harness itself; where the extra eval is installed."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.sources import model_path
from tests.engine.small import BOS, EOS, Letters, make_llm, model
from tests.reference import reference_logprobs

lm_eval = pytest.importorskip("lm_eval")  # before the imports that need it

from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import get_rolling_token_windows  # noqa: E402

from ksana_jax.lab.evaluation import KsanaLM  # noqa: E402
from ksana_jax.lab.evaluation.harness import read_settings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
SINKS = AttentionPattern(window=8, num_sinks=2, sink_position="cache")
TEXT = "the other one in here, then another: the end. "


@pytest.fixture(scope="module")
def lm():
    return KsanaLM(make_llm(Letters(), max_model_len=64, max_repositioned_sinks=2), max_gen_toks=8)


@pytest.fixture(autouse=True)
def full(lm):
    lm.llm.set_pattern(None)


def asked(*requests):
    return [SimpleNamespace(args=args if isinstance(args, tuple) else (args,)) for args in requests]


def sums(ids, first, pattern=None):
    """Sum of the float64 model's log-probabilities from a position on."""
    config, params = model()
    logprobs = reference_logprobs(params, config, ids, pattern)
    return sum(logprobs[t - 1, ids[t]] for t in range(first, len(ids)))


def test_the_model_is_known_by_its_name():
    assert get_model("ksana") is KsanaLM


@pytest.mark.parametrize("pattern", [None, SINKS], ids=["full", "sinks"])
def test_a_rolling_log_likelihood_is_one_pass_under_the_pattern(lm, pattern, caplog):
    lm.llm.set_pattern(pattern)
    found = lm.loglikelihood_rolling(asked(TEXT, "", "the"))
    ids = [BOS, *Letters().encode(TEXT, add_special_tokens=False)]
    assert len(ids) > 2 * SINKS.window
    assert found[0] == pytest.approx(sums(ids, 1, pattern), abs=1e-4 * len(ids))
    assert found[1] == 0.0 and not caplog.records


def test_a_text_beyond_max_model_len_is_split_as_by_the_harness_and_counted(lm, caplog):
    long = TEXT * 4
    tokens = Letters().encode(long, add_special_tokens=False)
    with caplog.at_level(logging.WARNING):
        [found] = lm.loglikelihood_rolling(asked(long))
    parts = get_rolling_token_windows(tokens, prefix_token=BOS, max_seq_len=lm.max_length - 1, context_len=1)
    wanted = sum(sums([*given, target[-1]], len(given) + 1 - len(target)) for given, target in parts)
    assert found == pytest.approx(wanted, abs=1e-4 * len(tokens))
    assert "1 of 1 texts are longer than 63 tokens" in caplog.text


def test_log_likelihoods_of_continuations(lm):
    tokenizer, pairs = Letters(), [("the other ", "one"), ("", "then"), ("in her", "e, there"), ("the ", "")]
    found = lm.loglikelihood(asked(*pairs), disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs[:3], found, strict=False):
        whole = tokenizer.encode(context + continuation)
        # A space at the end of a context belongs to the continuation.
        first = len(tokenizer.encode(context.rstrip()))
        assert total == pytest.approx(sums(whole, first), abs=1e-4 * len(whole)) and not greedy


def test_a_context_beyond_max_model_len_loses_its_beginning(lm, caplog):
    tokenizer, context = Letters(), TEXT * 4
    with caplog.at_level(logging.WARNING):
        [(total, _)] = lm.loglikelihood(asked((context, "xyz")), disable_tqdm=True)
    ids = tokenizer.encode(context + "xyz")[-63:]
    scored = len(tokenizer.encode(" xyz", add_special_tokens=False))
    assert total == pytest.approx(sums(ids, 63 - scored), abs=1e-4 * scored)
    assert "1 of 1 contexts are longer than 63 tokens" in caplog.text
    with pytest.raises(ValueError, match="a continuation has"):
        lm.loglikelihood(asked(("a", TEXT * 4)), disable_tqdm=True)


def test_generation_ends_at_a_stop_string_or_at_the_maximum(lm, caplog):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (text,) = (o.outputs[0].text for o in lm.llm.generate([TEXT], greedy))
    stop = text[2:4]
    requests = asked((TEXT, {"until": [stop]}), (TEXT, {"max_gen_toks": 8}), (TEXT, {"max_gen_toks": 3}))
    found = lm.generate_until(requests, disable_tqdm=True)
    assert found[:2] == [text[: text.index(stop)], text]
    assert found[2] != text and text.startswith(found[2])
    sampled = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 8}
    one, again, other = lm.generate_until(
        asked(*[(TEXT, sampled | {"seed": seed}) for seed in (1, 1, 2)]), disable_tqdm=True
    )
    assert one == again != other
    with caplog.at_level(logging.WARNING):
        lm.generate_until(asked((TEXT * 4, {})), disable_tqdm=True)
    assert "1 of 1 contexts are longer than max_model_len less max_gen_toks" in caplog.text
    with pytest.raises(ValueError, match="max_gen_toks is 64, must be below max_model_len 64"):
        lm.generate_until(asked((TEXT, {"max_gen_toks": 64})), disable_tqdm=True)


def test_chat_templates(lm):
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "in"}]
    assert lm.apply_chat_template(turns[:1]) == "<s><u>the<a>"
    assert lm.apply_chat_template(turns, add_generation_prompt=False) == "<s><u>the<u>in"
    # BOS is in the text already.
    assert lm.tok_encode("<s><u>the").count(BOS) == 1 == lm.tok_encode("the").count(BOS)
    assert lm.chat_template(True) == Letters().chat_template
    assert (lm.prefix_token_id, lm.eot_token_id) == (BOS, EOS)


def test_bos_is_left_out_or_added_whatever_the_tokenizer_does(lm, monkeypatch):
    plain = KsanaLM(lm.llm, add_bos_token=False)
    assert plain.tok_encode("the") == lm.tok_encode("the")[1:] and plain.tok_encode("<s>the") == lm.tok_encode("the")
    encode = Letters().encode
    monkeypatch.setattr(lm.tokenizer, "encode", lambda text, add_special_tokens=True: encode(text, False))
    added = KsanaLM(lm.llm, add_bos_token=True)
    assert added.tok_encode("the") == added.tok_encode("<s>the") == encode("the") != lm.tok_encode("the")
    assert added.tok_encode("the", add_special_tokens=False) == lm.tok_encode("the")


def test_an_answer_begins_after_its_thinking_in_which_no_stop_string_counts(lm, monkeypatch):
    [text] = (o.outputs[0].text for o in lm.llm.generate([TEXT], SamplingParams(temperature=0, max_tokens=8)))
    end = text[2:4]
    thinking = KsanaLM(lm.llm, max_gen_toks=8, enable_thinking=True, think_end_token=end)
    answer = text.rpartition(end)[2].lstrip()
    assert thinking.generate_until(asked((TEXT, {"until": [text[0]]})), disable_tqdm=True) == [answer.split(text[0])[0]]
    assert thinking.generate_until(asked((TEXT, {"max_gen_toks": 1})), disable_tqdm=True) == [text[0]]  # no end
    monkeypatch.setattr(lm.tokenizer, "chat_template", "{{ enable_thinking }}")
    turns = [{"role": "user", "content": "the"}]
    quiet = KsanaLM(lm.llm, enable_thinking=False)
    assert [each.apply_chat_template(turns) for each in (lm, thinking, quiet)] == ["", "True", "False"]
    for wrong in ({"enable_thinking": True}, {"think_end_token": 5}):
        with pytest.raises(ValueError, match=r"think_end_token is (None|5), must be a text such as </think>"):
            KsanaLM(lm.llm, **wrong)


def test_settings_with_dots_are_fields():
    given = {"max_model_len": 64, "pattern": "streaming_llm", "pattern.window": 8, "pattern.num_sinks": 2}
    pattern = {"preset": "streaming_llm", "window": 8, "num_sinks": 2}
    assert read_settings(given) == {"max_model_len": 64, "pattern": pattern}
    assert read_settings({"pattern.window": 8}) == {"pattern": {"window": 8}}


def test_settings_for_an_llm_that_exists_are_refused(lm):
    with pytest.raises(ValueError, match="settings for an LLM that exists already: window"):
        KsanaLM(lm.llm, window=8)
    with pytest.raises(ValueError, match="has no tokenizer"):
        KsanaLM(make_llm())


TASKS = {
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "complete": """
task: complete
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}


def test_local_tasks_run_offline(lm, tmp_path, monkeypatch):
    """Three tasks on local JSON lines; the answers were made such that the model is right on half of them."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    greedy = SamplingParams(temperature=0, max_tokens=6, stop=".")
    right = lm.llm.generate(["the end"], greedy)[0].outputs[0].text
    scores = lm.loglikelihood(asked(("the end", "er"), ("the end", "in")), disable_tqdm=True)
    best = int(np.argmax([total for total, _ in scores]))
    common = {"text": "the end", "choices": ["er", "in"]}
    lines = [common | {"gold": best, "answer": right}, common | {"gold": 1 - best, "answer": right + "x"}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(task + source)
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )["results"]
    assert found["choice"]["acc,none"] == 0.5 and found["complete"]["exact_match,none"] == 0.5
    [total, _] = lm.loglikelihood_rolling(asked("the end", "the end"))
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(-total / np.log(2) / len("the end"), rel=1e-6)


def test_log_likelihoods_are_those_of_transformers():
    """On the embedded model with the full cache; 1e-4 a token, the contract of the engine."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ours = KsanaLM(LLM("ksana-tiny", max_num_seqs=4, max_num_batched_tokens=64))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_path("ksana-tiny"), dtype=torch.float32)
    text = "import os\n\n\ndef main(argv):\n    return os.environ\n"
    ids = [ours.prefix_token_id, *ours.tok_encode(text, add_special_tokens=False)]
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(torch.tensor(ids)[None]).logits[0], -1).numpy().astype(np.float64)
    wanted = [logprobs[t - 1, ids[t]] for t in range(1, len(ids))]
    [total] = ours.loglikelihood_rolling(asked(text))
    assert total == pytest.approx(sum(wanted), abs=1e-4)
    pairs = [("import ", "os\n"), (text, "    x = 1"), ("", "class A:")]
    for (context, continuation), (found, greedy) in zip(pairs, ours.loglikelihood(asked(*pairs)), strict=True):
        whole = ours.tok_encode(context + continuation)
        first = len(ours.tok_encode(context.rstrip()))
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(torch.tensor(whole)[None]).logits[0], -1).numpy()
        assert found == pytest.approx(sum(logprobs[t - 1, whole[t]] for t in range(first, len(whole))), abs=1e-4)
        assert greedy == all(logprobs[t - 1].argmax() == whole[t] for t in range(first, len(whole)))
