"""The front door: inputs and outputs of `LLM.generate`."""

import dataclasses
import warnings

import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.engine.settings import beyond_training
from tests.engine.small import BOS, SMALL, VOCAB, Letters, assert_idle, complete, make_llm, model
from tests.reference import reference_logprobs
from tests.sampling.reference import penalised

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# float32 against float64 through two layers
TOLERANCE = 1e-4


def reference(prompt_ids, token_ids):
    config, params = model()
    return reference_logprobs(params, config, np.concatenate([prompt_ids, token_ids]))


def test_a_prompt_may_be_a_text_a_dict_ids_or_a_list_of_them(llm):
    ids = llm.tokenizer.encode("the hen")
    texts = ["the hen", {"prompt": "the hen"}]
    given = [{"prompt_token_ids": kind(ids)} for kind in (list, tuple, np.array, lambda x: np.array(x, np.uint8))]
    expected = complete(llm, "the hen").token_ids
    outputs = llm.generate(texts + given, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected] * 6
    assert [o.prompt for o in outputs] == ["the hen"] * 2 + [None] * 4
    assert all(o.prompt_token_ids == ids and o.prompt_token_ids[0] == BOS for o in outputs)
    for one in (texts[0], texts[1], given[0]):
        assert [o.outputs[0].token_ids for o in llm.generate(one, GREEDY)] == [expected]
    [both] = llm.generate({"prompt": "a name for it", "prompt_token_ids": ids}, GREEDY)
    assert (both.prompt, both.outputs[0].token_ids) == ("a name for it", expected)
    assert llm.generate([], GREEDY) == []


def test_a_question_follows_its_prompt_without_a_bos_of_its_own(llm):
    ids = [llm.tokenizer.encode("the hen"), llm.tokenizer.encode(", in", add_special_tokens=False)]
    asked = [
        {"prompt": "the hen", "question": ", in"},
        {"prompt_token_ids": ids[0], "question_token_ids": np.array(ids[1])},
    ]
    outputs = llm.generate(asked, GREEDY)
    assert [o.prompt for o in outputs] == ["the hen, in", None]
    assert all(o.prompt_token_ids == ids[0] + ids[1] for o in outputs)
    # Nothing is evicted here, so the question changes nothing.
    expected = llm.generate({"prompt_token_ids": ids[0] + ids[1]}, GREEDY)[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in outputs] == [expected] * 2


def test_changing_the_ids_afterwards_does_not_change_the_request(llm):
    ids = np.array(llm.tokenizer.encode("the hen"), np.int32)
    expected = complete(llm, "the hen").token_ids
    stream = llm.stream({"prompt_token_ids": ids}, GREEDY)
    next(stream)
    ids[:] = 3
    assert [*stream][-1].outputs[0].token_ids == expected


def test_greedy_tokens_are_the_most_probable_ones_of_the_dense_model(llm):
    prompts = ["a", "the hen", "in the end, there was nothing: 0"]
    for output in llm.generate(prompts, GREEDY):
        tokens = output.outputs[0].token_ids
        logprobs = reference(output.prompt_token_ids, tokens)
        assert tokens == logprobs[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist()


def test_the_fields_of_an_output(llm):
    outputs = llm.generate(["the hen", "a"], GREEDY)
    assert outputs[0].request_id != outputs[1].request_id
    for output in outputs:
        [completion] = output.outputs
        assert output.finished and completion.finished and completion.index == 0
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert len(completion.token_ids) == 24
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.logprobs is None and output.prompt_logprobs is None


def test_each_prompt_can_have_its_own_sampling_params(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5, 1)]
    outputs = llm.generate(["x.y"] * 3, params)
    base = complete(llm).token_ids
    assert [o.outputs[0].token_ids for o in outputs] == [base[:2], base[:5], base[:1]]


def test_the_output_ends_at_max_model_len(llm):
    ids = [BOS, *range(2, 62)]  # 61 tokens, 64 fit
    [output] = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"


def test_n_completions_differ_and_the_first_is_that_of_n_1(llm):
    given = {"temperature": 1.5, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    [output] = llm.generate("x.y", SamplingParams(n=6, **given))  # more than max_num_seqs 4
    tokens = [c.token_ids for c in output.outputs]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(t) for t in tokens}) == 6
    assert [c.text for c in output.outputs] == [llm.tokenizer.decode(t) for t in tokens]
    [again] = llm.generate("x.y", SamplingParams(n=6, **given))
    assert [c.token_ids for c in again.outputs] == tokens
    assert complete(llm, **given).token_ids == tokens[0]


def test_requests_without_a_seed_draw_from_the_engines_seed():
    free = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [BOS, 5]}] * 2

    def texts(seed):
        return [o.outputs[0].token_ids for o in make_llm(seed=seed).generate(prompts, free)]

    first = texts(1)
    assert first[0] != first[1]
    assert texts(1) == first
    assert texts(2) != first


def check_logprobs(entries, expected_TV, tokens, count):
    for entry, logprobs, token in zip(entries, expected_TV, tokens, strict=True):
        order = np.argsort(-logprobs)
        assert set(entry) == {int(token), *order[:count].tolist()}
        for candidate, found in entry.items():
            assert found.logprob == pytest.approx(logprobs[candidate], abs=TOLERANCE)
            assert found.rank == 1 + order.tolist().index(candidate)


@pytest.mark.parametrize("count", [0, 3, 20])
def test_log_probabilities_are_those_of_the_dense_model(llm, count):
    prompt = "in the end, there was nothing: 01"  # longer than a chunk of 16
    asked = SamplingParams(temperature=0, max_tokens=6, logprobs=count, prompt_logprobs=count, ignore_eos=True)
    [output] = llm.generate(prompt, asked)
    ids, completion = output.prompt_token_ids, output.outputs[0]
    expected = reference(ids, completion.token_ids)
    assert len(ids) > 2 * SMALL["max_num_batched_tokens"] - 8
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
    check_logprobs(output.prompt_logprobs[1:], expected[: len(ids) - 1], ids[1:], count)
    check_logprobs(completion.logprobs, expected[len(ids) - 1 : -1], completion.token_ids, count)


def test_log_probabilities_are_the_models_own_before_temperature_penalties_and_bias(llm):
    asked = SamplingParams(
        temperature=2.0,
        top_k=9,
        seed=5,
        max_tokens=8,
        logprobs=2,
        presence_penalty=1.0,
        logit_bias={9: 3.0},
        ignore_eos=True,
    )
    [output] = llm.generate("the hen", asked)
    tokens = output.outputs[0].token_ids
    expected = reference(output.prompt_token_ids, tokens)[len(output.prompt_token_ids) - 1 : -1]
    check_logprobs(output.outputs[0].logprobs, expected, tokens, 2)
    assert any(t != e.argmax() for t, e in zip(tokens, expected, strict=True))


def test_requests_of_a_batch_get_the_log_probabilities_that_each_asked_for(llm):
    asked = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=a, prompt_logprobs=b, ignore_eos=True)
        for a, b in ((None, None), (0, 2), (3, None), (None, 0))
    ]
    outputs = llm.generate(["the hen"] * 4, asked)
    for params, output in zip(asked, outputs, strict=True):
        got = output.outputs[0]
        assert got.token_ids == outputs[0].outputs[0].token_ids
        expected = reference(output.prompt_token_ids, got.token_ids)
        n = len(output.prompt_token_ids)
        if params.logprobs is None:
            assert got.logprobs is None
        else:
            check_logprobs(got.logprobs, expected[n - 1 : -1], got.token_ids, params.logprobs)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check_logprobs(
                output.prompt_logprobs[1:], expected[: n - 1], output.prompt_token_ids[1:], params.prompt_logprobs
            )


def test_a_prompt_of_one_token_has_no_log_probabilities_but_none(llm):
    [output] = llm.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


def test_penalties_reach_the_tokens(llm):
    given = {"presence": 0.5, "frequency": 1.5, "bias": {7: 9.0, 8: 8.0}}
    asked = SamplingParams(
        temperature=0,
        max_tokens=12,
        presence_penalty=0.5,
        frequency_penalty=1.5,
        logit_bias=given["bias"],
        ignore_eos=True,
    )
    [output] = llm.generate("x.y", asked)
    tokens, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    # These three do not mind that log-probabilities are scores moved by a constant.
    scores = reference(prompt, tokens)[len(prompt) - 1 : -1]
    expected = [penalised(s, tokens[:i], prompt, **given).argmax() for i, s in enumerate(scores)]
    assert tokens == expected != scores.argmax(-1).tolist()
    assert complete(llm, logit_bias={7: 100.0}, max_tokens=4).token_ids == [7] * 4


def test_without_a_tokenizer_ids_are_served_and_text_is_refused():
    llm = make_llm()
    [output] = llm.generate({"prompt_token_ids": [BOS, 4]}, SamplingParams(max_tokens=2, detokenize=False))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="no tokenizer: set detokenize=False"):
        llm.generate({"prompt_token_ids": [BOS, 4]})
    with pytest.raises(ValueError, match="no tokenizer: give prompt_token_ids"):
        llm.generate("text", SamplingParams(detokenize=False))
    with pytest.raises(ValueError, match="no tokenizer, so no chat template"):
        llm.chat([{"role": "user", "content": "a"}])
    assert_idle(llm)


def test_times_are_those_of_the_clock():
    llm = make_llm()
    llm.engine.clock = lambda: 100.0 + 0.5 * len(llm.records)  # half a second between the ends of two steps
    asked = [SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True) for n in (5, 1)]
    first, second = llm.generate([{"prompt_token_ids": [BOS] * 40}, {"prompt_token_ids": [BOS]}], asked)
    # Arrivals and the first end at 100; chunks of 16, 16 and 8 fill the only tile until 101; the last leaves room for a
    # token.
    assert (first.metrics.arrival_s, first.metrics.first_token_s, first.metrics.finished_s) == (100.0, 101.0, 103.0)
    assert (first.metrics.ttft_s, first.metrics.tpot_s, first.metrics.num_output_tokens) == (1.0, 0.5, 5)
    assert (second.metrics.ttft_s, second.metrics.tpot_s, second.metrics.num_output_tokens) == (1.0, None, 1)
    assert first.metrics.num_preemptions == 0


def test_chat_lays_messages_out_by_the_template(llm):
    messages = [{"role": "user", "content": "the hen"}]
    [output] = llm.chat(messages, GREEDY)
    assert output.prompt == "<s><u>the hen<a>"
    assert output.prompt_token_ids == llm.tokenizer.encode("<s><u>the hen<a>", add_special_tokens=False)
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.outputs[0].token_ids == complete(llm, {"prompt_token_ids": output.prompt_token_ids}).token_ids
    both = llm.chat([messages, messages + messages], GREEDY)
    assert [o.prompt for o in both] == ["<s><u>the hen<a>", "<s><u>the hen<u>the hen<a>"]
    assert both[0].outputs[0] == output.outputs[0]


@pytest.mark.parametrize("messages", [None, "text", {"role": "user", "content": "a"}, [{"role": "user"}], ["text"]])
def test_messages_of_another_form_are_refused(llm, messages):
    with pytest.raises(ValueError):
        llm.chat(messages)


OPTIONS = [
    ({"add_generation_prompt": False}, "<s><u>the hen<u>in"),
    ({"continue_final_message": True}, "<s><u>the hen<u>in"),
    ({"chat_template": "{{ messages[1].content }}"}, "in"),
    ({"chat_template": "{{ a }}", "chat_template_kwargs": {"a": "the"}}, "the"),
    ({"chat_template": "{{ tools[0].name }}", "tools": [{"name": "add"}]}, "add"),
]


@pytest.mark.parametrize(("options", "prompt"), OPTIONS)
def test_options_of_a_chat_reach_the_template(llm, options, prompt):
    messages = [{"role": "user", "content": "the hen"}, {"role": "assistant", "content": "in"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1), **options)
    assert output.prompt == prompt
    assert [one["prompt"] for one in llm.chat_prompts([messages, messages], **options)] == [prompt] * 2


def test_errors_name_the_method_that_was_called(llm):
    messages = [{"role": "user", "content": "a"}]
    for call, method in ((llm.chat, "LLM.chat"), (llm.chat_prompts, "LLM.chat_prompts")):
        with pytest.raises(ValueError, match=f"{method} has no setting 'tool'; the nearest is 'tools'"):
            call(messages, tool=[])
    with pytest.raises(ValueError, match="this engine takes no adapters: a lora_request needs enable_lora=True"):
        llm.chat(messages, lora_request="a")
    with pytest.raises(ValueError, match=r"LLM.chat has no setting 'prompt_token_ids'"):
        llm.chat(messages, prompt_token_ids=[5])


def test_a_tokenizer_without_a_chat_template_cannot_chat():
    with pytest.raises(ValueError, match="letters comes without a chat template"):
        make_llm(Letters(chat_template=None)).chat([{"role": "user", "content": "a"}])


def test_texts_beyond_the_trained_positions_warn_exactly_once():
    config, params = model()
    pattern = AttentionPattern(window=16, num_sinks=2, sink_position="cache")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The 65th token is sampled after the 64th, and never computed itself.
        LLM.from_params(config, params, max_model_len=65, pattern=pattern, **SMALL)
        assert not caught
        llm = LLM.from_params(config, params, max_model_len=66, pattern=pattern, **SMALL)
        llm.set_pattern(None)
    [warning] = caught
    assert "max_model_len is 66, the model was trained for 64 positions" in str(warning.message)
    assert warning.filename == __file__


def test_a_dynamic_rope_beyond_the_trained_positions_warns_that_short_texts_change_too():
    config, params = model()
    config = dataclasses.replace(config, rope=RopeConfig("dynamic", 10_000.0, 2.0, original_max_len=64))
    with pytest.warns(UserWarning, match="all texts, short ones too, have the frequencies of a text of max_model_len"):
        LLM.from_params(config, params, max_model_len=66, **SMALL)


def test_a_yarn_rope_is_warned_of_beyond_the_positions_to_which_it_stretches():
    config = dataclasses.replace(model()[0], rope=RopeConfig("yarn", 1e4, 4.0, original_max_len=48))
    assert config.max_position == 64 and beyond_training(config, 193) is None
    said = "max_model_len is 194, the model was trained for 64 positions, which its YaRN rope stretches to 192: past"
    assert str(beyond_training(config, 194)).startswith(said)
    config = dataclasses.replace(config, max_position=192)  # as other files say it
    assert "trained for 192 positions: past" in str(beyond_training(config, 194))


def test_the_pattern_changes_only_while_nothing_runs(llm):
    expected = complete(llm).token_ids
    stream = llm.stream("x.y", GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="1 requests are running"):
        llm.set_pattern(AttentionPattern(window=3))
    assert [*stream][-1].outputs[0].token_ids == expected
    llm.set_pattern(AttentionPattern(window=3))
    changed = complete(llm).token_ids
    llm.set_pattern(None)
    assert complete(llm).token_ids == expected != changed


def test_the_layer_with_too_many_sinks_is_named():
    llm = make_llm(max_repositioned_sinks=3)
    patterns = [AttentionPattern(), AttentionPattern(window=4, num_sinks=17, sink_position="ceiling")]
    with pytest.raises(ValueError, match=r"17 sinks at 'ceiling' positions.*give it max_repositioned_sinks=17"):
        llm.set_pattern(patterns)


def test_settings_that_cannot_be_are_refused():
    config, params = model()
    for given, message in (
        ({"block_size": 0}, "block_size is 0, must be an integer from 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"dtype": "f64"}, "dtype is 'f64', must be one of f32, bf16, f16, auto"),
        ({"policy": "lifo"}, "policy is 'lifo', must be one of fcfs"),
        ({"memory_bytes": 10}, "a KV block takes 4,096 bytes, memory_bytes is 10"),
        ({"pattern": [AttentionPattern()]}, "1 attention patterns were given, the model has 2 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM.from_params(config, params, **given)


def test_a_tokenizer_without_the_model_s_end_of_text_is_refused():
    tokenizer = Letters()
    tokenizer.vocab_size = 1
    with pytest.raises(ValueError, match="eos_token_id 1 is beyond the tokenizer's 1 ids"):
        make_llm(tokenizer)


def test_a_text_ends_with_the_tokens_that_only_the_tokenizer_names(llm):
    [free] = llm.generate("x.y", SamplingParams(temperature=0, max_tokens=12))
    ids = free.outputs[0].token_ids
    turn = next(i for i in ids[2:] if i not in ids[:2])
    tokenizer = Letters()
    tokenizer.more_eos_ids = (turn, VOCAB)  # the embedding has no row for the last
    named = make_llm(tokenizer)
    [ended] = named.generate("x.y", SamplingParams(temperature=0, max_tokens=12))
    end = ids.index(turn) + 1
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == (ids[:end], "stop")
    [later] = named.generate("x.y", SamplingParams(temperature=0, max_tokens=12, min_tokens=end))
    assert turn not in later.outputs[0].token_ids[:end]
    ignoring = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert (
        named.generate("x.y", ignoring)[0].outputs[0].token_ids == llm.generate("x.y", ignoring)[0].outputs[0].token_ids
    )
