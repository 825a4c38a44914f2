"""A real pretrained model for tests, where its file is on this machine. Nothing is downloaded."""

import os
from pathlib import Path

import pytest

from ksana_jax.compilation_cache import cache_folder

_SMOLLM2 = "smollm2/b179c9523d0e/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct in Q4_1: KSANA_SMOLLM2, or as `ksana fetch smollm2` stores it.

    Skips the test where there is no such file.
    """
    path = Path(os.environ.get("KSANA_SMOLLM2") or cache_folder("fetched") / _SMOLLM2)
    if not path.is_file():
        pytest.skip(f"needs SmolLM2-135M-Instruct.Q4_1.gguf, at {path} or where KSANA_SMOLLM2 says")
    return path
