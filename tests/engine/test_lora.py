"""Adapters in one engine: batches of several, against PEFT, each adapter alone, and the model without any."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ksana_jax import LLM, LoRARequest, SamplingParams
from ksana_jax.devices import tuning
from ksana_jax.engine.adapters import Adapters
from ksana_jax.loading.adapter import WEIGHTS
from tests import machine
from tests.engine.small import assert_idle, make_llm

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = "llama-gqa-tied"
NAMES = ("plain", "all", "one-layer")
# A fourth, whose rows have stored lengths (DoRA).
LENGTHS = "lengths"
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=0, detokenize=False)
CASES = sorted(path.name for path in (GOLDEN / "lora").iterdir())


def adapter(name: str, folder: Path | None = None) -> LoRARequest:
    return LoRARequest(name, 1 + len(name), str(folder or GOLDEN / "lora" / f"{BASE}-{name}"))


def engine(base: str = BASE, **settings) -> LLM:
    few: dict[str, Any] = {"num_blocks": 32, "max_num_batched_tokens": 32, "max_model_len": 64}
    return make_llm(folder=GOLDEN / base, **(few | {"enable_lora": True, "max_loras": 3} | settings))


def adapters_of(llm: LLM) -> Adapters:
    assert llm.engine.factory.adapters is not None
    return llm.engine.factory.adapters


def digest_of(llm: LLM):
    return lambda name: adapters_of(llm).use(adapter(name)).digest


def watch_writes(llm: LLM) -> list[tuple[int, str]]:
    """The (slot, digest) of each adapter that is written to a slot from now on."""
    slots, writes = adapters_of(llm).slots, []
    write = slots._write

    def watched(slot, adapter):
        writes.append((slot, adapter.digest))
        write(slot, adapter)

    slots._write = watched
    return writes


def copy_adapter(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Copies a golden adapter; returns its tensors."""
    shutil.copytree(adapter(name).lora_path, folder, dirs_exist_ok=True)
    return load_file(folder / WEIGHTS)


@pytest.fixture(scope="module")
def llm():
    return engine()


def expected(case: str) -> tuple[list[int], np.ndarray]:
    """A prompt, and the log-probabilities [T, V] that PEFT's model gives."""
    with np.load(GOLDEN / "lora" / case / "expected.npz") as found:
        return found["prompt"].tolist(), found["logprobs"]


def scores(output) -> np.ndarray:
    """Log-probabilities of the prompt's tokens after the first, and of the new ones."""
    new = [s[t].logprob for s, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)]
    ids = output.prompt_token_ids
    return np.array([output.prompt_logprobs[t][ids[t]].logprob for t in range(1, len(ids))] + new)


def assert_equals_peft(output, logprobs: np.ndarray) -> None:
    """Rounding in float32 is below 1e-5 of the spread of the log-probabilities."""
    ids = output.prompt_token_ids
    given = logprobs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(scores(output)[: len(given)], given, rtol=0, atol=1e-5 * np.ptp(logprobs))
    assert output.outputs[0].token_ids[0] == logprobs[-1].argmax()


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_gives_the_log_probabilities_of_peft(case):
    prompt, logprobs = expected(case)
    base = max((path.name for path in GOLDEN.iterdir() if case.startswith(f"{path.name}-")), key=len)
    with engine(base) as llm:
        request = LoRARequest("adapter", 1, str(GOLDEN / "lora" / case))
        [output] = llm.generate(prompt_token_ids=[prompt], sampling_params=SCORED, lora_request=request)
        [plain] = llm.generate(prompt_token_ids=[prompt], sampling_params=SCORED)
    assert_equals_peft(output, logprobs)
    assert np.abs(scores(plain) - scores(output))[:-4].max() > 0.1


def test_a_batch_of_several_adapters_and_none_equals_each_alone(llm):
    prompts = [expected(f"{BASE}-{name}")[0] for name in (*NAMES, "plain")]
    requests = [*map(adapter, NAMES), None]
    together = llm.generate(prompt_token_ids=prompts, sampling_params=SCORED, lora_request=requests)
    for prompt, request, output in zip(prompts, requests, together, strict=True):
        [alone] = llm.generate(prompt_token_ids=[prompt], sampling_params=SCORED, lora_request=request)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        np.testing.assert_allclose(scores(alone), scores(output), atol=1e-5)
    for name, output in zip(NAMES, together, strict=False):
        assert_equals_peft(output, expected(f"{BASE}-{name}")[1])


def texts(llm: LLM, requests: Any, num_tokens: int = 6, **params) -> list[list[list[int]]]:
    """Token ids of the completions of each request, all of the same prompt length, served together."""
    asked = SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, "detokenize": False} | params)
    outputs = llm.generate(prompt_token_ids=PROMPTS[: len(requests)], sampling_params=asked, lora_request=requests)
    assert_idle(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def soak(settings: dict[str, Any]):
    return pytest.param(settings, marks=pytest.mark.soak)


PROMPTS = [np.random.default_rng(at).integers(2, 128, 20).tolist() for at in range(12)]
MIXED = [adapter("plain"), None, adapter("all"), adapter(LENGTHS), adapter("plain"), None]


@pytest.fixture(scope="module")
def usual(llm):
    return texts(llm, MIXED)


def test_tokens_depend_on_the_adapter(llm, usual):
    assert texts(llm, [None] * 6) != usual
    assert [one == other for one, other in zip(usual, texts(llm, [None] * 6), strict=True)].count(True) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"max_loras": 1},
        soak({"max_loras": 2, "max_cpu_loras": 2}),
        soak({"async_scheduling": False}),
        {"num_scheduler_steps": 3},
        soak({"max_num_batched_tokens": 8, "query_tile": 4}),
        {"enable_prefix_caching": True, "block_size": 4},
        soak({"num_blocks": 5}),
        {"num_blocks": 5, "host_cache_bytes": 2**20, "preempt": "swap"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"operators": {"linear": "xla"}},
        soak({"shared_prefix_attention": True}),
        {"max_lora_rank": 40},
    ],
    ids=str,
)
def test_tokens_are_the_same_however_adapters_are_served(settings, usual):
    with engine(**settings) as llm:
        assert texts(llm, MIXED) == usual
        assert texts(llm, MIXED[::-1]) != usual
        assert texts(llm, MIXED) == usual


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        soak({"quantization": "w8a8"}),
        soak({"dtype": "bf16"}),
        soak({"kv_cache_dtype": "int8"}),
        {"kv_eviction": {"method": "h2o", "budget": 16, "prompts": "streamed"}},
        {"speculative_config": {"method": "trie", "num_speculative_tokens": 3, "decoding_mode": "hier"}},
    ],
    ids=str,
)
def test_rows_of_different_adapters_do_not_change_each_other(settings):
    with engine(**settings) as llm:
        together = texts(llm, MIXED)
        for at, request in enumerate(MIXED):
            requests: list = [None] * at + [request]
            assert texts(llm, requests)[at] == together[at]


@pytest.mark.cpu("it changes their tuning")
@pytest.mark.parametrize("change", [{"joins_matrices": True}, {"layers_of_program": 1}, {"layers_of_program": 4}])
def test_tokens_are_the_same_with_joined_matrices_and_in_programs_of_layers(change, usual, monkeypatch):
    monkeypatch.setitem(tuning._TUNING, "cpu", dataclasses.replace(tuning.tuning("cpu"), **change))
    with engine(programs={}, operators={"linear": "xla"}) as llm:
        assert (llm.runner.params.layers[0].w_qkv is not None) == ("joins_matrices" in change)
        assert texts(llm, MIXED) == usual


@pytest.mark.parametrize("params", [{"beam_width": 3, "n": 2}, {"n": 3, "temperature": 0.9, "seed": 1}], ids=str)
def test_all_completions_of_a_request_have_its_adapter(llm, params):
    together = texts(llm, MIXED[:4], **params)
    for at, request in enumerate(MIXED[:4]):
        requests: list = [MIXED[1]] * at + [request]
        assert texts(llm, requests, **params)[at] == together[at]
    assert texts(llm, [None] * 4, **params)[0] != together[0]


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "linear", ["xla", *(pytest.param(name, marks=machine.native_products) for name in ("native", "packed"))]
)
def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_adapters(dtype, linear):
    settings = {"dtype": dtype, "operators": {"linear": linear}, "max_num_seqs": 3}
    with engine(**settings) as adapted, engine(enable_lora=False, **settings) as plain:
        requests = [None, adapter("all"), None]
        asked = {"prompt_token_ids": PROMPTS[:3], "sampling_params": SCORED}
        outputs, expected = adapted.generate(**asked, lora_request=requests), plain.generate(**asked)
    for at in (0, 2):
        np.testing.assert_array_equal(scores(outputs[at]), scores(expected[at]))
    assert not np.array_equal(scores(outputs[1]), scores(expected[1]))


def test_slots_are_replaced_while_requests_wait():
    names = ["plain", "all", "one-layer", "plain", "all", "one-layer"]
    requests = [*map(adapter, names), None, None]
    with engine(max_loras=2, max_num_seqs=8) as llm:
        writes = watch_writes(llm)
        together = texts(llm, requests)
        # Two run at once; the others wait for them to end, in the order of arrival.
        assert writes == [*zip((0, 1, 0, 1, 0, 1), map(digest_of(llm), names), strict=True)]
        assert texts(llm, [adapter("one-layer")])[0] == texts(llm, [adapter("one-layer")])[0]
        assert len(writes) == adapters_of(llm).slots.num_writes == 6
    with engine(max_loras=3, max_num_seqs=8) as llm:
        assert texts(llm, requests) == together


def test_a_sequence_that_waits_for_a_slot_lets_those_without_adapters_pass():
    with engine(max_loras=1, max_num_seqs=8) as llm:
        order = []
        requests = [adapter("plain"), adapter("all"), adapter("plain"), None]
        asked = [SamplingParams(temperature=0, max_tokens=count, detokenize=False) for count in (12, 2, 2, 2)]
        for output in llm.stream([{"prompt_token_ids": p} for p in PROMPTS[:4]], asked, lora_request=requests):
            if output.finished:
                order.append(output.prompt_token_ids)
        assert [PROMPTS.index(prompt) for prompt in order] == [3, 0, 1, 2]


def test_prefixes_are_shared_within_one_adapter_only(tmp_path):
    with engine(enable_prefix_caching=True, block_size=4) as llm:

        def cached(request):
            asked = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            [output] = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=asked, lora_request=request)
            return output.num_cached_tokens

        assert [cached(r) for r in (None, adapter("plain"), adapter("all"))] == [0, 0, 0]
        assert [cached(r) for r in (None, adapter("plain"), adapter("all"))] == [16, 16, 16]
        # Contents count, not names: a copy hits, and another adapter in the same folder does not.
        copy_adapter("plain", tmp_path)
        assert cached(LoRARequest("copy", 7, str(tmp_path))) == 16
        assert adapters_of(llm).slots.num_writes == 2
        copy_adapter("one-layer", tmp_path)
        assert cached(LoRARequest("copy", 7, str(tmp_path))) == 0


def test_a_salt_divides_the_prefixes_of_an_adapter():
    with engine(enable_prefix_caching=True, block_size=4) as llm:
        asked = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        for salt, cached in (("", 0), ("a", 0), ("a", 16), ("", 16)):
            prompt = {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}
            [output] = llm.generate(prompt, asked, lora_request=adapter("plain"))
            assert output.num_cached_tokens == cached


def test_an_adapter_whose_scores_are_not_finite_ends_its_request_only(llm, usual, tmp_path):
    values = copy_adapter("all", tmp_path)
    save_file({name: x * np.float32(1e30) for name, x in values.items()}, tmp_path / WEIGHTS)
    requests = [*MIXED]
    requests[2] = LoRARequest("broken", 9, str(tmp_path))
    asked = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    news = list(llm.stream([{"prompt_token_ids": p} for p in PROMPTS[:6]], asked, lora_request=requests))
    ended = {tuple(output.prompt_token_ids): output.outputs[0] for output in news if output.finished}
    outputs = [ended[tuple(prompt)] for prompt in PROMPTS[:6]]
    assert outputs[2].finish_reason == "error" and "not finite" in (outputs[2].error or "")
    for at in (0, 1, 3, 4, 5):
        assert outputs[at].token_ids == usual[at][0]
    assert texts(llm, MIXED) == usual


def test_an_adapter_that_cannot_be_read_refuses_its_requests_alone(llm, usual, tmp_path):
    copy_adapter("plain", tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"adapter 'broken': .*header"):
        texts(llm, [LoRARequest("broken", 9, str(tmp_path))])
    assert texts(llm, MIXED) == usual


def test_adapters_are_kept_in_host_memory_up_to_max_cpu_loras():
    with engine(max_loras=1, max_cpu_loras=2) as llm:
        adapters = adapters_of(llm)
        uses = [adapters.use(adapter(name)) for name in NAMES]
        assert adapters.use(adapter("one-layer")) is uses[2] and adapters.use(adapter("all")) is uses[1]
        again = adapters.use(adapter("plain"))
        assert again is not uses[0] and again.digest == uses[0].digest


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda llm: texts(llm, [LoRARequest("none", 1, "no/such")]), "adapter 'none': no/such: there is no such path"),
        (lambda llm: texts(llm, [LoRARequest("none", 1, "./none")]), "adapter 'none': none/adapter_config.json: No"),
        (lambda llm: texts(llm, ["name"]), "lora_request is a str, must be a LoRARequest"),
        (lambda llm: llm.generate(PROMPTS[0], SCORED, lora_request=[None] * 2), "1 prompts and 2 lora_requests"),
        (lambda llm: LoRARequest("name", 0, "folder"), "lora_int_id is 0, must be an integer from 1"),
        (lambda llm: LoRARequest("", 1, "folder"), "lora_name is '', must be a name"),
        (lambda llm: LoRARequest("name", 1, ""), "lora_path is '', must be the path of a folder or a name"),
        (lambda llm: engine(max_loras=0), "max_loras is 0, must be an integer from 1 to 1,024"),
        (lambda llm: engine(max_loras=4, max_cpu_loras=2), "max_cpu_loras is 2, must be an integer from 4"),
    ],
)  # fmt: skip
def test_bad_requests_and_settings_get_one_sentence(llm, call, error):
    with pytest.raises(ValueError, match=error):
        call(llm)


def test_an_engine_without_adapters_says_how_to_enable_them():
    with engine(enable_lora=False) as llm, pytest.raises(ValueError, match="a lora_request needs enable_lora=True"):
        texts(llm, [adapter("plain")])


def test_the_memory_plan_counts_the_slots():
    with engine() as adapted, engine(enable_lora=False) as plain:
        assert adapted.memory_usage()["weights"].measured == adapted.memory_plan.weights_bytes
        assert adapted.memory_plan.weights_bytes > plain.memory_plan.weights_bytes


def test_a_failed_step_leaves_adapters_usable(usual):
    with engine() as llm:
        submit = llm.engine.executor.submit
        texts(llm, [adapter("all")])

        def fail(step):
            llm.engine.executor.submit = submit
            raise RuntimeError("device lost")

        llm.engine.executor.submit = fail
        with pytest.raises(RuntimeError, match="device lost"):
            texts(llm, MIXED)
        assert texts(llm, MIXED) == usual
