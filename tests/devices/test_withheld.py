"""Each function and operation that is withheld leaves the engine running, or one line names it."""

import json
import subprocess
import sys

import pytest

from ksana_jax.devkit.device_check.withheld import RUNS, RUNS_WITH_RBG

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


@pytest.mark.soak
def test_what_is_withheld_is_done_without_or_named():
    command = [
        sys.executable,
        "-m",
        "ksana_jax.devkit.device_check.withheld",
        ",".join(OPERATIONS),
        ",".join(FUNCTIONS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    operations, functions = json.loads(done.stdout.splitlines()[-1])
    for wanted, found, says in (
        (OPERATIONS, operations, "failed to legalize operation '{}'"),
        (FUNCTIONS, functions, "PJRT_{} is not implemented by the loopback plugin"),
    ):
        assert list(found) == list(wanted)
        for name, outcomes in wanted.items():
            for asked, outcome in zip(("greedy", "sampled"), outcomes, strict=True):
                said = found[name][asked]
                assert "\n" not in said and (said == outcome if outcome else says.format(name) in said), (name, said)
