"""vLLM's names, docs/use/coming-from-vllm.md, and what is said of names that do not exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.vllm_names import PAGE, RENAMED
from ksana_jax.engine.settings import engine_config
from tests.engine.small import Letters, make_llm


def section(title: str) -> str:
    text = (Path(__file__).parents[2] / PAGE).read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_page_has_every_renamed_setting_and_the_same_value_under_both_names():
    pairs = re.findall(r"^\| `(.+?)`.*? \| `(.+?)`", section("Renamed"), re.MULTILINE)
    for theirs, ours in pairs:
        both = [engine_config(eval(f"dict({code})")) for code in (theirs, ours)]  # noqa: S307  our own page
        assert both[0] == both[1] != EngineConfig()
    assert [theirs.partition("=")[0] for theirs, _ in pairs] == [*RENAMED]


def test_what_the_page_calls_missing_is_missing():
    cells = re.findall(r"^\| (`.+?`) \|", section("Missing"), re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(cells))
    assert len(names) > 30
    known = {field.name for kind in (EngineConfig, SamplingParams) for field in dataclasses.fields(kind)}
    assert not known & {*names}


@pytest.fixture(scope="module")
def llm():
    return make_llm(Letters())


def test_an_engine_takes_vllms_names_together():
    llm = make_llm(swap_space=0.001, tensor_parallel_size=1, dtype="float32")
    assert llm.config.host_cache_bytes == int(0.001 * 2**30) and llm.config.dtype == "f32"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: engine_config({"max_num_seq": 4}), "LLM has no setting 'max_num_seq'; the nearest is 'max_num_seqs'"),
        (lambda: engine_config({"gpu_memory_utilisation": 4}), "the nearest is 'gpu_memory_utilization'"),
        (lambda: engine_config({"patern": "full"}), "LLM has no setting 'patern'; the nearest is 'pattern'"),
        (lambda: engine_config({"zzzz": 4}), f"LLM has no setting 'zzzz'; see {PAGE}"),
        (
            lambda: engine_config({"swap_space": 1, "host_cache_bytes": 1}),
            "swap_space and host_cache_bytes are two names",
        ),
        (lambda: engine_config({"swap_space": "4"}), "host_cache_bytes is '4', must be an integer from 0"),
        (lambda: engine_config({"enforce_eager": True}), f"LLM has no setting 'enforce_eager'; see {PAGE}"),
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
        assert "attention full | window=8, num_sinks=4; " in repr(llm)
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
