"""Runs all groups of checks on a device, each in a separate process with a time limit, and shows their findings."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ksana_jax.core.device_setting import canonical_device
from ksana_jax.lab.device_check.checks import GROUPS
from ksana_jax.lab.device_check.findings import Finding

TOKENS = "tokens"
SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """Findings of all groups. device: the setting. groups: {group: findings}. verdict: None if tokens are the CPU's, or
    why they are not."""

    device: Any
    groups: dict[str, list[Finding]]
    verdict: str | None

    def plain(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        groups = {name: [dataclasses.asdict(f) for f in found] for name, found in self.groups.items()}
        return {"device": self.device, "verdict": self.verdict, "groups": groups}

    def text(self) -> str:
        """Returns the report as `ksana doctor --device` prints it."""
        lines = [line for name, found in self.groups.items() for line in (name, *map(_line, found))]
        return "\n".join([*lines, _verdict(self.verdict), ""])


def _line(f: Finding) -> str:
    mark = {True: "works", False: "missing", None: ""}[f.works]
    instead = f" -> {f.without}" if f.works is False and f.without else ""
    return f"  {mark:<7} {f.what}" + (f": {f.detail}" if f.detail else "") + instead


def _verdict(verdict: str | None) -> str:
    return "The engine's tokens are the CPU's." if verdict is None else f"The engine does not run here: {verdict}."


def probe(
    setting: Any, seconds: float = SECONDS, on_group: Callable[[str, list[Finding]], None] = lambda *_: None
) -> DeviceReport:
    """Tries out a device.

    Args:
      setting: the setting `device`; None takes jax's default.
      seconds: time limit of a group.
      on_group: called with each group's name and findings as soon as they arrive.

    Raises:
      ConfigError: the setting is wrong.
    """
    device, groups = canonical_device(setting), {}
    for name in GROUPS:
        groups[name] = _run(name, device, seconds)
        on_group(name, groups[name])
    return DeviceReport(device, groups, _compared(groups[TOKENS], _run(TOKENS, {"platform": "cpu"}, seconds)))


def _run(group: str, device: Any, seconds: float) -> list[Finding]:
    command = [sys.executable, "-m", "ksana_jax.lab.device_check.child", group, json.dumps(device)]
    # Otherwise the child's C++ libraries log into the report.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=seconds)
        ended = None
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        ended = f"it hung, and was ended after {seconds:g} s"
    found = [Finding(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    if ended is None and process.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        code = process.returncode
        ended = f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}: {last[:300]}"
    if ended is not None:
        after = f"after {found[-1].what!r}" if found else "at once"
        found.append(Finding("the rest of this group", False, f"{ended}, {after}"))
    return found


def _compared(here: list[Finding], cpu: list[Finding]) -> str | None:
    """Returns the difference from the CPU's tokens, or None."""
    if broken := [f for f in (*here, *cpu) if f.works is False]:
        return f"{broken[0].what}: {broken[0].detail}"
    for a, b in zip(here, cpu, strict=True):
        if a.detail != b.detail:
            return f"{a.what} are {a.detail}, the CPU's {b.detail}"
    return None


def show(setting: Any, as_json: bool = False) -> int:
    """Prints the report of a device as it is made; returns the exit code, 0 if the engine runs there."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)

    def group(name: str, found: list[Finding]) -> None:
        console.print(f"[bold]{name}[/bold]")
        for f in found:
            console.print(escape(_line(f)), style="red" if f.works is False else None)

    report = probe(setting, on_group=group)
    console.print(f"[bold]{escape(_verdict(report.verdict))}[/bold]")
    if as_json:
        print(json.dumps(report.plain()))
    return 0 if report.verdict is None else 1
