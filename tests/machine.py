"""What tests need of the machine, as marks: where it is missing, a test is skipped and says what is."""

import pytest

from ksana_jax.native.build import why_missing
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from tests.loopback import openxla, wrapper


def _needs(what: str, missing: str | None) -> pytest.MarkDecorator:
    return pytest.mark.skipif(missing is not None, reason=f"needs {what}: {missing}")


no_compiler = why_missing()
no_native_products = next(i for i in LINEAR_IMPLEMENTATIONS if i.name == "packed").unsupported("cpu", "float32")

# Operators in C++, which any CPU runs.
compiled = _needs("a C++ compiler", no_compiler)
# Products with weights in C++ as well, and so all that `numerics: invariant` takes of a model that C++ can compute.
native_products = _needs("native products", no_native_products)
# A PJRT plugin of others, which `make test` fetches.
real_plugin = _needs("OpenXLA's CPU plugin", openxla.why_missing())
# The same behind the wrapper that withholds parts of it.
loopback_plugin = _needs("the loopback", wrapper.why_missing())
