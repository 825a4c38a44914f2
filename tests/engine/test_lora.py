"""Adapters in one engine: batches of several, against PEFT, each adapter alone, and the model without any."""

from pathlib import Path

import numpy as np
import pytest

from ksana_jax import LLM, LoRARequest, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = "llama-gqa-tied"
NAMES = ("plain", "all", "one-layer")
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=0, detokenize=False)
CASES = sorted(path.name for path in (GOLDEN / "lora").iterdir())


def adapter(name: str, folder: Path | None = None) -> LoRARequest:
    return LoRARequest(name, 1 + len(name), str(folder or GOLDEN / "lora" / f"{BASE}-{name}"))


def engine(base: str = BASE, **settings) -> LLM:
    small = {"num_blocks": 64, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
    return LLM(GOLDEN / base, **(small | {"enable_lora": True, "max_loras": 3} | settings))


@pytest.fixture(scope="module")
def llm():
    return engine()


def expected(case: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(GOLDEN / "lora" / case / "expected.npz") as found:
        return found["prompt"], found["logprobs"]


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
    prompts = [expected(f"{BASE}-{name}")[0] for name in NAMES] + [expected(f"{BASE}-plain")[0]]
    requests = [*map(adapter, NAMES), None]
    together = llm.generate(prompt_token_ids=prompts, sampling_params=SCORED, lora_request=requests)
    for prompt, request, output in zip(prompts, requests, together, strict=True):
        [alone] = llm.generate(prompt_token_ids=[prompt], sampling_params=SCORED, lora_request=request)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        np.testing.assert_allclose(scores(alone), scores(output), atol=1e-5)
    for name, output in zip(NAMES, together, strict=False):
        assert_equals_peft(output, expected(f"{BASE}-{name}")[1])
