"""Beams of the paged network equal the dense network's, and transformers'."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.request import FinishReason
from ksana_jax.models.dense import dense_logits
from ksana_jax.ops.weight_packing import unpacked
from tests.engine.small import VOCAB, assert_idle, make_llm, model
from tests.expected import searched
from tests.fakes import until_stop

LONGEST = 32


def dense_beams(config, params, prompts, asked):
    """Beams of each prompt, over the unpaged network; texts are padded to one length, as a causal network allows."""
    scores = jax.jit(lambda text: jax.nn.log_softmax(dense_logits(params, text, config=config)))

    def continuations(prompt, text):
        whole = np.zeros(LONGEST, np.int32)
        whole[: len(prompt) + len(text)] = [*prompt, *text]
        return list(enumerate(np.asarray(scores(whole))[len(prompt) + len(text) - 1].tolist()))

    return [
        searched(functools.cache(functools.partial(continuations, prompt)), *settings[:2], config.eos_ids, settings[2])
        for prompt, settings in zip(prompts, asked, strict=True)
    ]


def expect_beams(output, expected) -> None:
    assert [tuple(c.token_ids) for c in output.outputs] == [text for _, text in expected[: len(output.outputs)]]
    given = [c.cumulative_logprob for c in output.outputs]
    np.testing.assert_allclose(given, [total for total, _ in expected[: len(given)]], atol=1e-4)


PROMPTS = [np.random.default_rng(s).integers(2, VOCAB, 14 + s).tolist() for s in range(3)]
ASKED = [(3, 1.0, 16), (3, 0.6, 14), (2, 1.5, 16)]  # width, length penalty, tokens


def beams_of(llm, prompts, asked):
    given = [
        SamplingParams(beam_width=w, n=w, length_penalty=p, max_tokens=m, temperature=0, detokenize=False)
        for w, p, m in asked
    ]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], given)


@functools.cache
def expected():
    return dense_beams(*model(), PROMPTS, ASKED)


SMALL_POOL = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 8}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": True},
        {"preempt": "swap", "host_cache_bytes": 2**20},
    ],
    ids=["recomputed", "cached", "swapped"],
)
def test_beams_of_the_paged_network_are_those_of_the_dense_one_in_a_small_pool(settings):
    llm = make_llm(**SMALL_POOL, **settings)
    for output, best in zip(beams_of(llm, PROMPTS, ASKED), expected(), strict=True):
        expect_beams(output, best)
    assert_idle(llm)
    assert llm.engine.scheduler.num_preemptions > 0
    assert bool(llm.engine.memory.counters.swapped_in) == ("preempt" in settings)


@pytest.mark.soak
def test_beams_of_the_embedded_model_are_those_of_its_dense_network():
    llm = LLM(
        "ksana-tiny",
        dtype="f32",
        block_size=8,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        query_tile=16,
        max_model_len=LONGEST,
    )
    buckets = llm.engine.builder.buckets  # of each kind one, to compile little
    few = dataclasses.replace(
        buckets, decodes=buckets.decodes[-1:], tiles=buckets.tiles[-1:], widths=buckets.widths[-1:]
    )
    llm.engine.builder = dataclasses.replace(llm.engine.builder, buckets=few)
    prompts = [llm.tokenizer.encode(text) for text in ("def __init__(self, ", "import ")]
    asked = [(3, 1.0, 10), (2, 0.0, 6)]
    outputs = beams_of(llm, prompts, asked)
    expected = dense_beams(llm.model_config, unpacked(llm.runner.params), prompts, asked)
    for output, best in zip(outputs, expected, strict=True):
        expect_beams(output, best)
    assert_idle(llm)


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
@pytest.mark.parametrize("num_ends", [0, 1, 2])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(penalty, num_ends, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ksana_jax.loading import export_hf

    config, params = model()
    asked = [(width, penalty, 12) for width in (1, 2, 4)]
    # Ends that these texts come across: of tokens that beams without an end take.
    endless = dense_beams(dataclasses.replace(config, eos_ids=()), params, PROMPTS, asked)
    seen = dict.fromkeys(token for _, text in endless[2] for token in text[4:])
    ends = tuple(seen)[:num_ends]
    assert len(ends) == num_ends
    config = dataclasses.replace(config, eos_ids=ends)
    export_hf(tmp_path, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    llm = make_llm(block_size=4, num_blocks=40)
    llm.engine.factory.eos_ids = ends
    stopped = 0
    for (width, _, count), prompt in zip(asked, PROMPTS, strict=True):
        [output] = beams_of(llm, [prompt], [(width, penalty, count)])
        with torch.no_grad():
            found = theirs.generate(
                torch.tensor([prompt]),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=penalty,
                early_stopping=False,
                max_new_tokens=count,
                pad_token_id=0,
                eos_token_id=list(ends) or None,
            )
        texts = [until_stop(text[len(prompt) :].tolist(), ends) for text in found]  # what follows an end is filled up
        assert [c.token_ids for c in output.outputs] == texts
        stopped += sum(c.finish_reason is FinishReason.STOP for c in output.outputs)
    assert bool(stopped) == bool(num_ends)
