"""A greedy request without `LLM`: the engine's parts, and the loop that they run in.

  python examples/one_request.py "def main("

`Engine` adds requests that share steps, steps that are submitted ahead of the last one's tokens, text as it grows, stop
strings and reports. The tokens are the same.
"""

from __future__ import annotations

import sys

import numpy as np

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.request import SamplingParams
from ksana_jax.core.sources import model_path
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.engine import Engine
from ksana_jax.loading.load import open_model
from ksana_jax.tokenizers import load_tokenizer


def build(name: str) -> Engine:
    """Builds an engine: a scheduler with its KV memory, a builder of steps, and a runner with weights and pool."""
    folder = model_path(name)
    model, read_weights = open_model(folder, "f32")
    config = EngineConfig(dtype="f32", max_model_len=256, num_blocks=64)
    return build_engine(model, read_weights, config, tokenizer=load_tokenizer(folder))


def generate(engine: Engine, prompt: str, params: SamplingParams) -> str:
    """Completes one prompt."""
    scheduler, builder, runner, tokenizer = engine.scheduler, engine.builder, engine.executor, engine.tokenizer
    assert tokenizer is not None
    request = engine.new_request(np.array(tokenizer.encode(prompt), np.int32), params)
    [seq] = request.sequences
    scheduler.add(seq)
    tokens = []
    while (batch := scheduler.schedule()) is not None:  # which rows compute how many tokens, with blocks for them
        step, _ = builder.build(batch, scheduler.rows)  # padded arrays: tokens, positions, slots, block tables
        step.moves = scheduler.memory.take_moves()  # copies of blocks before the step; here there are none
        pending = runner.submit(step)  # the network, which writes keys and values, and the choice of tokens
        scheduler.advance(batch)  # counts computed tokens, and returns blocks that no token will attend to
        output = pending.result()
        scheduler.settle(batch, output.tokens[: len(batch.sampled)])  # appends tokens, ends sequences
        tokens += batch.new_tokens.tolist()
    return tokenizer.decode(tokens)


if __name__ == "__main__":
    [text] = sys.argv[1:] or ["def main("]
    print(generate(build("ksana-tiny"), text, SamplingParams(temperature=0, max_tokens=32)))
