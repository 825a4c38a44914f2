"""Pretrained models and texts that `ksana fetch` has stored, as marks: a test of one runs only where it is.

from tests import real

@real.smollm2
def test_...():
    LLM("smollm2")
"""

import pytest

from ksana_jax.sources import fetched


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(fetched(name) is None, reason=f"needs `ksana fetch {name}`")


smollm2, gemma3_270m, essays = map(_needs, ("smollm2", "gemma3-270m", "essays"))
