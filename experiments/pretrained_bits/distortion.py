"""python -m experiments.pretrained_bits.distortion [MODEL]: the error of codecs on a model's keys and values.

Prints a table: the squared error of codes, relative to the squared numbers, in %, over all layers and heads of one
excerpt; of the first token, which is the sink, apart. Keys are rotated, as they are stored.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy

from ksana_jax import LLM, SamplingParams
from ksana_jax.kv.codecs.registry import find_block_codec
from ksana_jax.lab.runs.texts import ExcerptSpec, draw_excerpts

NUM_TOKENS, BLOCK = 1024, 32
CODECS = (
    "int8 fp8_e4m3 kivi4 gear4 hadamard4 turboquant4 int4 turboquant3 gear2 kivi2 turboquant2 hadamard2 int2".split()
)


def read(model: str) -> np.ndarray:
    """Returns the exact keys and values of an excerpt: [blocks, layers, 2, heads, BLOCK, head_dim]."""
    llm = LLM(model, block_size=BLOCK, max_num_seqs=1, max_model_len=NUM_TOKENS + BLOCK, enable_prefix_caching=True)
    [excerpt] = draw_excerpts(["python-docs"], llm.tokenizer, 1, ExcerptSpec(NUM_TOKENS, True), 0)
    [output] = llm.generate([{"prompt_token_ids": excerpt.ids}], SamplingParams(temperature=0, max_tokens=1))
    with tempfile.TemporaryDirectory() as folder:
        llm.save_session(output, folder)
        [path] = Path(folder).glob("*.safetensors")
        stored = safetensors.numpy.load_file(path)
    [part] = [name for name in stored if name.startswith("0.") and name.endswith("places")]
    return stored["block.kv"][stored[part]]


def by_token(x: np.ndarray) -> np.ndarray:
    """Turns blocks [n, layers, heads, BLOCK, head_dim] into tokens [n * BLOCK, layers, heads, head_dim]."""
    tokens = np.moveaxis(x, 3, 1)
    return tokens.reshape(-1, *tokens.shape[2:])


def error(exact: np.ndarray, decoded: np.ndarray) -> float:
    return 100 * float(np.sum((decoded - exact) ** 2, dtype=np.float64) / np.sum(exact**2, dtype=np.float64))


def main(model: str = "smollm2") -> None:
    blocks = read(model)
    sides = {"k": blocks[:, :, 0], "v": blocks[:, :, 1]}
    print("| codec | keys, % | the first token's | values, % | the first token's |")
    print("|---|---:|---:|---:|---:|")
    for name in CODECS:
        cells = []
        for side, exact in sides.items():
            codec = find_block_codec(name)(side=side)
            decoded = codec.decode(codec.encode(exact, np), np)
            a, b = (by_token(x) for x in (exact, decoded))
            cells += [error(a[1:], b[1:]), error(a[0], b[0])]
        print(f"| {name} | {' | '.join(f'{cell:.2g}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
