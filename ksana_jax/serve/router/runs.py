"""Maps blocks to servers in runs: neighbours on a chain of blocks that the same servers have.

A look-up from the last known block of a prompt then goes from run to run instead of from block to block. Servers mostly
gain chains from the front and lose them from the end, which keeps runs whole. Nothing depends on that: blocks that
servers report, whose place in a prompt is unknown, and blocks of a run that loses another are in no run. They are
searched in steps, until a prompt that has them is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ksana_jax.serve.router.request import Hash

# Blocks by which a search through blocks without a run steps: 8 is fastest for prompts of 30 to 200 blocks.
STEP = 8
# First block of blocks outside runs.
LOOSE = 1 << 62


class _Run:
    """The blocks chain[start - offset : end - offset], which all have these servers; none if start is LOOSE.

    start, end: numbers of blocks within a prompt. offset: number of the first block of chain, which runs share.
    """

    __slots__ = ("before", "chain", "end", "offset", "servers", "start")

    def __init__(self, servers: int, start: int = LOOSE, chain: list[Hash] | None = None, offset: int = 0):
        self.servers, self.start, self.end, self.chain, self.offset = servers, start, start, chain, offset
        self.before: _Run | None = None


class Holders:
    """Sets of servers, as the bits of an int, by the hash of a block."""

    def __init__(self) -> None:
        self._runs: dict[Hash, _Run] = {}
        self._met_loose = False  # in a look-up since the last `settle`

    def __len__(self) -> int:
        return len(self._runs)

    def of(self, found: Hash) -> int:
        """Returns the servers that have a block."""
        run = self._runs.get(found)
        return run.servers if run is not None else 0

    def levels(self, hashes: Sequence[Hash]) -> list[tuple[int, int]]:
        """Returns the servers by their number of leading blocks of a prompt, as `Match.levels`.

        A server with a block is assumed to have the blocks before it, because caches evict ends first.
        """
        runs, found = self._runs, []
        if not hashes or hashes[0] not in runs:
            return found
        at, end = 0, len(hashes)  # some server has block `at`, none has `end`
        while end - at > 1:
            middle = (at + end) >> 1
            if hashes[middle] in runs:
                at = middle
            else:
                end = middle
        get, known, floor, there = runs.get, 0, end, 0
        after: _Run | None = None
        while at >= 0:
            run = None
            if after is not None:
                run = after.before
                # It may have moved on since, or after's chain may branch off before it.
                if run is not None and ((run.chain is not after.chain and at != after.offset - 1) or at >= run.end):
                    run = None
            if run is None or run.start > at:
                run = get(hashes[at])
                if after is not None:
                    after.before = run
            if run is None:  # a gap in the servers' reports
                at, after = at - 1, None
                continue
            servers = run.servers
            if more := servers & ~known:
                found.append((at + 1, more))
                known |= more
            if run.start <= at:
                at, after = run.start - 1, run
                continue
            after, self._met_loose = None, True
            if at <= floor and at:  # blocks in no run: servers of block `floor` count
                floor = max(at - STEP, 0)
                there = self.of(hashes[floor])
            at = floor if servers == there and floor < at else at - 1
        found.reverse()
        return found

    def settle(self, hashes: Sequence[Hash]) -> None:
        """Makes runs of those blocks of a prompt that are in none, if a look-up has met such blocks."""
        if not self._met_loose:
            return
        self._met_loose, runs, made = False, self._runs, None
        for number, found in enumerate(hashes):
            run = runs.get(found)
            if run is None or run.chain is not None:
                made = None
                continue
            if made is None or made.servers != run.servers:
                chain: list[Hash] = []
                made = _Run(run.servers, number, chain, number)
            chain.append(found)
            made.end = number + 1
            runs[found] = made

    def gain(self, bit: int, hashes: Sequence[Hash], numbers: Sequence[int]) -> None:
        """Adds a server to blocks of a prompt that it does not have.

        Args:
          numbers: of the blocks, ascending.
        """
        number, end = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
        if end - number != len(numbers):  # the server has some between them, which is rare
            for number in numbers:
                self.gain_one(bit, hashes[number])
            return
        while number < end:
            run = self._runs.get(hashes[number])
            if run is None:
                number += self._start(bit, number, hashes[number:end])
            elif number == run.start and (count := self._join(bit, run, hashes[number:end])):
                number += count
            else:
                self.gain_one(bit, hashes[number])
                number += 1

    def gain_one(self, bit: int, found: Hash) -> None:
        """Adds a server to a block."""
        runs = self._runs
        run = runs.get(found)
        if run is None:
            runs[found] = _Run(bit)
        elif not run.servers & bit and not self._join(bit, run, (found,)):
            run.start, run.chain = LOOSE, None
            runs[found] = _Run(run.servers | bit)

    def _start(self, bit: int, start: int, hashes: Sequence[Hash]) -> int:
        """Starts a run with the leading blocks of a prompt's rest that no server had; returns how many."""
        run = _Run(bit, start, chain := [], start)
        add, enter = chain.append, self._runs.setdefault
        for found in hashes:
            if enter(found, run) is not run:
                break
            add(found)
        run.end = start + len(chain)
        return len(chain)

    def _join(self, bit: int, run: _Run, hashes: Sequence[Hash]) -> int:
        """Adds a server to the blocks at the front of a run that match a prompt; returns how many."""
        runs, chain, start, offset = self._runs, run.chain, run.start, run.offset
        if chain is None:
            return 0
        blocks = chain[start - offset : run.end - offset]
        count = len(blocks)
        if blocks == list(hashes[:count]):
            run.servers |= bit
            return count
        pairs = enumerate(zip(blocks, hashes, strict=False))
        count = next((at for at, (one, other) in pairs if one != other), min(count, len(hashes)))
        if count:
            servers = run.servers | bit
            into = runs.get(chain[start - 1 - offset]) if start > offset else None
            if into is None or into.chain is not chain or into.end != start or into.servers != servers:
                into = _Run(servers, start, chain, offset)
            run.start = into.end = start + count
            runs.update(dict.fromkeys(blocks[:count], into))
        return count

    def lose(self, bit: int, blocks: Iterable[Hash]) -> None:
        """Takes a server from blocks, which it has."""
        runs, last, chain, offset, into = self._runs, None, None, 0, None
        for found in blocks:
            run = runs[found]
            end = run.end - 1
            if run is not last:
                last, chain, offset, servers = run, run.chain, run.offset, run.servers & ~bit
                into = self._after(run, servers) if servers else None
            if chain is None or chain[end - offset] != found:
                run.start, run.chain, last = LOOSE, None, None
                if into is None:
                    del runs[found]
                else:
                    runs[found] = _Run(run.servers & ~bit)
                continue
            run.end = end
            if into is not None:
                into.start = end
                runs[found] = into
            else:
                del runs[found]
                if end + 1 - offset == len(chain):
                    chain.pop()

    def _after(self, run: _Run, servers: int) -> _Run:
        """Returns the run behind a run if it has these servers, or one that has no block yet."""
        chain, end, at = run.chain, run.end, run.end - run.offset
        if chain is not None:
            into = self._runs.get(chain[at]) if at < len(chain) else None
            if into is not None and into.chain is chain and into.start == end and into.servers == servers:
                return into
        return _Run(servers, end, chain, run.offset)
