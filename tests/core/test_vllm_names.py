"""The tables of docs/use/coming-from-vllm.md, line by line, and what other names are told."""

import re
from pathlib import Path

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.settings import engine_config
from tests.core.vllm_page import page
from tests.engine.small import Letters, make_llm

PAGE = Path(__file__).parents[2] / "docs" / "use" / "coming-from-vllm.md"


def rows(where: str) -> list[tuple[str, str, str]]:
    """The lines of one table: vLLM's keyword, what it is here, and the sentence."""
    section = PAGE.read_text().partition(f"## {where}\n")[2].partition("\n## ")[0]
    found, words = [], ("", "")
    for line in section.splitlines():
        if line.startswith("The same: "):
            found += [(code, "the same", "") for code in re.findall(r"`(.+?)`", line)]
        elif line.startswith("| "):
            first, second, sentence = map(str.strip, line[1:-1].split("|"))
            if "`" not in first + second:
                words = first, second
            elif words == ("no effect", "refused"):
                found += [(code, words[0], sentence) for code in re.findall(r"`(.+?)`", first)]
                found += [(code, words[1], sentence) for code in re.findall(r"`(.+?)`", second)]
            else:
                found.append((first.strip("`"), second, sentence))
    return found


def keyword(code: str) -> dict:
    """{"n": 2} of "n=2"."""
    return eval(f"dict({code})", {"SamplingParams": SamplingParams})  # noqa: S307  our own page


def check(make, code: str, here: str, sentence: str):
    """Asserts what a line says of make(**keywords), the value of which two calls that mean the same share."""
    if here == "refused":
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            make(**keyword(code))
    elif here == "no effect":
        assert make(**keyword(code)) == make()
    elif here != "the same":
        assert make(**keyword(code)) == make(**keyword(here.strip("`"))) != make()
    else:
        make(**keyword(code))


def test_the_page_is_what_the_table_makes():
    assert PAGE.read_text() == page(), "python -m tests.core.vllm_page > docs/use/coming-from-vllm.md"
    assert len(rows("LLM")) > 50 and len(rows("LLM.generate")) > 8 and len(rows("SamplingParams")) > 25
    assert len(rows("LLM.chat")) > 8


@pytest.mark.parametrize(("code", "here", "sentence"), rows("SamplingParams"))
def test_every_line_of_sampling_params(code, here, sentence):
    check(SamplingParams, code, here, sentence)
    if here == "the same":
        [(name, value)] = keyword(code).items()
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("code", "here", "sentence"), rows("LLM"))
def test_every_line_of_llm(code, here, sentence):
    if code.partition("=")[0] in ("load_format", "tokenizer"):  # of a directory
        assert here == "the same"
        LLM("ksana-tiny", max_num_seqs=1, max_model_len=16, **keyword(code))
    else:
        check(lambda **given: engine_config(given), code, here, sentence)


@pytest.fixture(scope="module")
def llm():
    return make_llm(Letters())


@pytest.mark.parametrize(("code", "here", "sentence"), rows("LLM.generate"))
def test_every_line_of_generate(llm, code, here, sentence):
    def tokens(**given):
        if not {"prompts", "prompt_token_ids"} & set(given):
            given["prompts"] = "x.y"
        params = SamplingParams(temperature=0, max_tokens=2)
        outputs = llm.generate(**{"sampling_params": params} | given)
        return [output.outputs[0].token_ids for output in outputs]

    check(tokens, code, here, sentence)


@pytest.mark.parametrize(("code", "here", "sentence"), rows("LLM.chat"))
def test_every_line_of_chat(llm, code, here, sentence):
    messages, params = [{"role": "user", "content": "x.y"}], SamplingParams(temperature=0, max_tokens=2)
    check(lambda **given: [output.prompt for output in llm.chat(messages, params, **given)], code, here, sentence)


def test_an_engine_takes_vllms_names_together():
    names = {"swap_space": 0.001, "tensor_parallel_size": 1, "enforce_eager": True, "trust_remote_code": False}
    llm = make_llm(**names, dtype="float32")
    assert llm.config.host_cache_bytes == int(0.001 * 2**30) and llm.config.dtype == "f32"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: engine_config({"max_num_seq": 4}), "LLM has no setting 'max_num_seq'; the nearest is 'max_num_seqs'"),
        (lambda: engine_config({"gpu_memory_utilisation": 4}), "the nearest is 'gpu_memory_utilization'"),
        (lambda: engine_config({"patern": "full"}), "LLM has no setting 'patern'; the nearest is 'pattern'"),
        (lambda: engine_config({"zzzz": 4}), "LLM has no setting 'zzzz'"),
        (
            lambda: engine_config({"swap_space": 1, "host_cache_bytes": 1}),
            "swap_space and host_cache_bytes are two names",
        ),
        (lambda: engine_config({"swap_space": "4"}), "host_cache_bytes is '4', must be an integer from 0"),
        (lambda: engine_config({"pipeline_parallel_size": True}), "LLM does not support pipeline_parallel_size=True"),
        (lambda: SamplingParams(temprature=1), "SamplingParams has no setting 'temprature'; the nearest is 'temp"),
        (lambda: LLM(5), "model is of type int, must be a path or a name"),
        (lambda: LLM("ksana-tiny", tokenizer=5), "tokenizer is of type int, must be a path, a ksana_jax Tokenizer or"),
        (lambda: LLM("ksana-tiny", revision="v1"), "together are 'ksana-tiny@v1', which is not a name of the hub"),
    ],
)
def test_what_is_not_here_is_one_sentence(make, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "prompts is None, must be a text, a list of token ids, a dict, or a list of those"),
        ({"prompts": "a", "prompt_token_ids": [5]}, "a prompt that has both is a dict"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is of type int, must be lists of integers"),
        ({"prompts": [[5, 6], [7.5]]}, "prompt_token_ids must be a list of integers, not float64 of shape (1,)"),
        ({"prompts": [[[5, 6], [7]]]}, "prompt_token_ids must be a list of integers, not lists of different lengths"),
        ({"prompts": "a", "use_tqdm": "yes"}, "use_tqdm is 'yes', must be True or False"),
        ({"prompts": "a", "promts": "b"}, "LLM.generate has no setting 'promts'; the nearest is 'prompts'"),
        (
            {"prompts": "a", "sampling_params": {"n": 1}},
            "sampling_params is of type dict, must be a SamplingParams or a",
        ),
        ({"prompts": "a", "sampling_params": [5]}, "sampling_params has a int, each must be a SamplingParams"),
    ],
)
def test_arguments_of_generate_that_cannot_be_are_one_sentence(llm, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        llm.generate(**given)
    assert not llm.engine.requests


def test_a_prompt_as_ids_is_the_prompt_as_text(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.get_tokenizer().encode("x.y")
    calls = [llm.generate(form, params) for form in ("x.y", ids, [ids], {"prompt_token_ids": ids})]
    calls.append(llm.generate(prompt_token_ids=[ids, ids], sampling_params=params))
    assert [len(outputs) for outputs in calls] == [1, 1, 1, 1, 2]
    assert len({tuple(output.outputs[0].token_ids) for outputs in calls for output in outputs}) == 1


def test_a_progress_bar_is_drawn_on_standard_error_where_it_is_asked_for(llm, capsys):
    params = SamplingParams(max_tokens=2)
    llm.generate(["a", "b"], params)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], params, use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "tokens/s" in err


def test_an_llm_is_closed_at_the_end_of_with_and_says_what_it_is(tmp_path):
    settings = {"enable_prefix_caching": True, "host_cache_bytes": 2**16, "disk_cache_dir": str(tmp_path)}
    with make_llm(Letters(), pattern="streaming_llm", **settings) as llm:
        said = repr(llm)
        llm.set_pattern(["full", {"preset": "streaming_llm", "window": 8}])
        assert "attention full | window=8, num_sinks=4" in repr(llm)
        with pytest.raises(ValueError, match="there is no attention pattern 'sliding'"):
            llm.set_pattern("sliding")
        llm.set_pattern("streaming_llm")
        llm.generate("x.y and more text than a block holds", SamplingParams(max_tokens=9))
        unread = llm.stream("x.y", SamplingParams(max_tokens=9))
        next(unread)
    assert not llm.engine.requests and list(tmp_path.rglob("*.kv"))
    for part in ("16 KV blocks of 16 tokens", "f32", "max_model_len", "window=1020, num_sinks=4", "0 requests"):
        assert part in said
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        make_llm().get_tokenizer()
