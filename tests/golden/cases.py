"""The golden cases: tiny models with what transformers computes for them; see make_golden.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent


class GoldenCase(NamedTuple):
    """A model and its expected output. Prompts have 1, 9 and 70 tokens (40 for dynamic rope, within its context)."""

    name: str
    model_dir: Path
    prompts: list[np.ndarray]  # [T] int32
    logprobs: list[np.ndarray]  # [T, V] float32, of the token after each position
    greedy: list[np.ndarray]  # [16] int32, what follows each prompt


def golden_cases() -> Iterator[GoldenCase]:
    """Every case; texts and their 16 greedy tokens stay within max_position_embeddings."""
    for folder in sorted(path.parent for path in HERE.glob("*/expected.npz")):
        with np.load(folder / "expected.npz", allow_pickle=False) as expected:
            columns = [[expected[f"{kind}_{i}"] for i in range(3)] for kind in ("prompt", "logprobs", "greedy")]
        yield GoldenCase(folder.name, folder, *columns)


def golden_case(name: str) -> GoldenCase:
    return next(case for case in golden_cases() if case.name == name)


def beyond_context() -> tuple[Path, np.ndarray, np.ndarray]:
    """A text of 120 tokens for the dynamic rope model of 64 positions: model_dir, tokens [T], logprobs [T, V].

    transformers stretches by the length of the text, so the longest text to be served must be given as 120.
    """
    folder = HERE / "llama-rope-dynamic"
    with np.load(folder / "expected.npz", allow_pickle=False) as expected:
        return folder, expected["beyond"], expected["beyond_logprobs"]
