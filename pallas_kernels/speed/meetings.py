"""Barriers in shared memory at which the warpgroups of a block wait for each other, found in one turn of a loop."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from pallas_kernels.speed.sass import Instruction


def find_meetings(turn: Sequence[Instruction]) -> dict[int, str]:
    """Returns the barrier of each arrival and wait at which warpgroups meet, by its place in the turn.

    A barrier is known by the register that holds its address and by the sum added to it. If a turn waits as
    often as it arrives, warpgroups meet; barriers of copies have waits alone, barriers of free buffers have arrivals
    alone.
    """
    added: dict[str, str] = {}
    places: defaultdict[str, list[int]] = defaultdict(list)
    for n, instruction in enumerate(turn):
        if instruction.name == "SYNCS":
            if match := re.search(r"\[(\w+)(?:\+(0x[0-9a-f]+))?", instruction.operands):
                register, offset = match.groups()
                places[f"{register} {added.get(register, '')} {offset or ''}"].append(n)
        elif match := re.match(r"(UR\d+|R\d+)\b", instruction.operands):
            constant = re.search(r"0x[0-9a-f]{4,}", instruction.operands)
            added[match.group(1)] = constant.group() if constant else f"{n}"
    found = {}
    for barrier, where in places.items():
        kinds = Counter(_kind(turn[n]) for n in where)
        if kinds["arrives"] == kinds["waits"] > 0:
            found |= dict.fromkeys(where, barrier)
    return found


def _kind(instruction: Instruction) -> str:
    return "waits" if waits(instruction) else "arrives" if "ARRIVE" in instruction.opcode else ""


def waits(instruction: Instruction) -> bool:
    """True if an instruction waits for a barrier in shared memory."""
    return instruction.name == "SYNCS" and "PHASECHK" in instruction.opcode


class Meetings:
    """Arrivals of the warps of one block at their barriers.

    Where they meet several times in a turn, they take turns: the second warp is one meeting ahead, so that one of them
    multiplies matrices while the other does not.
    """

    def __init__(self, turn: Sequence[Instruction], warps: int):
        self._barriers = find_meetings(turn) if warps > 1 else {}
        often = Counter(barrier for n, barrier in self._barriers.items() if waits(turn[n]))
        self._first = [[barrier for barrier, times in often.items() if times > 1 and warp] for warp in range(warps)]
        self._arrivals = {barrier: [[0.0] if barrier in first else [] for first in self._first] for barrier in often}
        self._waited = [Counter(first) for first in self._first]
        self._done: set[int] = set()

    def open(self, warp: int, n: int, begins: bool) -> float:
        """Returns when instruction n may be issued, infinity while another warp has yet to arrive.

        Args:
          begins: it is the warp's first one.
        """
        barriers = self._first[warp] if begins else []
        when = max((self._met(barrier, 1) for barrier in barriers), default=0.0)
        if n in self._barriers:
            when = max(when, self._met(self._barriers[n], self._waited[warp][self._barriers[n]] + 1))
        return when

    def _met(self, barrier: str, times: int) -> float:
        """When all warps have arrived as many times."""
        arrivals = [a for warp, a in enumerate(self._arrivals[barrier]) if warp not in self._done]
        return max((a[times - 1] if len(a) >= times else float("inf") for a in arrivals), default=0.0)

    def issue(self, warp: int, n: int, instruction: Instruction, when: float) -> None:
        """Notes an arrival or a wait."""
        if n in self._barriers:
            if waits(instruction):
                self._waited[warp][self._barriers[n]] += 1
            else:
                self._arrivals[self._barriers[n]][warp].append(when)

    def leave(self, warp: int) -> None:
        """Nobody waits for a warp any longer."""
        self._done.add(warp)
