"""Each function and operation that is withheld leaves the engine running, or one line names it."""

import pytest

from tests.loopback.withheld import RUNS, RUNS_WITH_RBG, without
from tests.machine import loopback_plugin

# Of each kind of outcome some; docs/reference/accelerator.md has all.
OPERATIONS = {
    "dynamic while": (RUNS, RUNS),
    "stablehlo.xor": (RUNS, RUNS_WITH_RBG),
    "stablehlo.sort": (RUNS, None),
    "stablehlo.scatter": (None, None),
}
FUNCTIONS = {
    "Device_MemoryStats": (RUNS, RUNS),
    "LoadedExecutable_Execute": (None, None),
    "Memory_Kind": (None, None),
}


@loopback_plugin
@pytest.mark.soak
def test_what_is_withheld_is_done_without_or_named():
    for option, wanted, says in (
        ("lacks_operations", OPERATIONS, "failed to legalize operation '{}'"),
        ("lacks", FUNCTIONS, "PJRT_{} is not implemented by the loopback plugin"),
    ):
        found = without(option, wanted)
        assert list(found) == list(wanted)
        for name, outcomes in wanted.items():
            for asked, outcome in zip(("greedy", "sampled"), outcomes, strict=True):
                said = found[name][asked]
                assert "\n" not in said and (said == outcome if outcome else says.format(name) in said), (name, said)
