"""Runs one group of checks on a device and prints its findings as lines of JSON, as a module (`python -m`)."""

from __future__ import annotations

import dataclasses
import json
import sys


def main(group: str, setting: str) -> None:
    """Prints each finding at once: a later check may end the process.

    Args:
      group: a name in `checks.GROUPS`. setting: the setting `device` as JSON.
    """
    from ksana_jax.devices.starting import use_device

    use_device(json.loads(setting))
    from ksana_jax.lab.device_check.checks import GROUPS

    for finding in GROUPS[group]():
        print(json.dumps(dataclasses.asdict(finding)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
