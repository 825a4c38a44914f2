"""How XLA:CPU compiles the tests: in half of the time, with emitters whose programs run more slowly.

`make soak` keeps the default, which users have. Versions of jaxlib from 0.11 on have no such choice, and a library that
is built with another XLA ends the process at a flag that it does not know.
"""

import os
from importlib.metadata import version

from packaging.version import Version

_FLAG = "--xla_cpu_use_fusion_emitters=false"


def use_quick() -> None:
    """Sets the flag for this process, in which jax has not started, and for its children."""
    if Version(version("jaxlib")) < Version("0.11") and _FLAG not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}".strip()


def default() -> dict[str, str]:
    """Returns the environment variable with which a child compiles as users do."""
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(_FLAG, "").strip()}
