"""For tests that compile for a GPU: they need the extra aot-gpu."""

import pytest

from pallas_kernels import aot

needs_plugin = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
