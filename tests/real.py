"""Pretrained models that `ksana fetch` has stored, as marks: a test of one runs only where it is.

from tests import real

@real.smollm2
def test_...():
    LLM("smollm2")
"""

import pytest

from ksana_jax.core.sources import fetched

smollm2 = pytest.mark.skipif(fetched("smollm2") is None, reason="needs `ksana fetch smollm2`")
gemma3 = pytest.mark.skipif(fetched("gemma3-270m") is None, reason="needs `ksana fetch gemma3-270m`")
