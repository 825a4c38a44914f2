"""Runs of blocks: look-ups find what a search block by block finds, and take few steps."""

import random

import pytest

from ksana_jax.serve.router.runs import Holders
from tests.serve.router.invariants import check_holders
from tests.serve.router.test_index import names

SERVERS = 6


def texts_of(dice):
    """Texts that begin like one another, up to any of their blocks."""
    texts = ["".join(dice.choice("ab") for _ in range(dice.randrange(1, 60)))]
    for letter in "cdefgh":
        text = dice.choice(texts)
        texts.append(text[: dice.randrange(len(text) + 1)] + letter * dice.randrange(1, 40))
    return [names(text) for text in texts]


def change(dice, holders, have, chains, by_one):
    """One server gains the start of a text, or loses blocks: those of a text, or any, the last ones first."""
    server = dice.randrange(SERVERS)
    bit, mine, chain = 1 << server, have[server], dice.choice(chains)
    if dice.random() < 0.6:
        chain = chain[: dice.randrange(len(chain) + 1)]
        numbers = [number for number, found in enumerate(chain) if found not in mine]
        if by_one:
            for number in numbers:
                holders.gain_one(bit, chain[number])
        else:
            holders.gain(bit, chain, numbers)
        mine.update(chain)
        return
    longest_first = sorted(mine, key=lambda found: (-len(found), found))
    lost = longest_first[: dice.randrange(30)]
    if dice.random() < 0.5:
        start = dice.choice(chain)
        lost = [found for found in longest_first if found.startswith(start)]
    holders.lose(bit, lost)
    mine.difference_update(lost)


def check(holders, have):
    check_holders(
        holders, {found: sum(1 << n for n in range(SERVERS) if found in have[n]) for found in set().union(*have)}
    )


@pytest.mark.parametrize("told", [0.0, 0.1, 1.0], ids=["sent", "sent and told", "told"])
def test_a_look_up_finds_who_has_which_leading_blocks(told):
    for seed in range(40):
        dice = random.Random(seed)
        holders, have, chains = Holders(), [set() for _ in range(SERVERS)], texts_of(dice)
        for _ in range(60):
            change(dice, holders, have, chains, dice.random() < told)
            check(holders, have)
            chain = dice.choice(chains)
            expected = {}
            for server, mine in enumerate(have):
                blocks = next((number for number, found in enumerate(chain) if found not in mine), len(chain))
                expected[blocks] = expected.get(blocks, 0) | 1 << server
            expected.pop(0, None)
            assert holders.levels(chain) == sorted(expected.items()), f"seed {seed}"
            if dice.random() < 0.5:
                holders.settle(chain)
                check(holders, have)
                assert holders.levels(chain) == sorted(expected.items()), f"seed {seed}"


def test_blocks_may_come_and_go_in_any_order():
    for seed in range(60):
        dice = random.Random(seed)
        holders, have, chains = Holders(), [set() for _ in range(SERVERS)], texts_of(dice)
        for _ in range(40):
            change(dice, holders, have, chains, dice.random() < 0.3)
            mine = have[server := dice.randrange(SERVERS)]
            lost = dice.sample(sorted(mine), min(len(mine), dice.randrange(6)))
            holders.lose(1 << server, lost)
            mine.difference_update(lost)
            check(holders, have)
            levels = holders.levels(chain := dice.choice(chains))
            holders.settle(chain)
            check(holders, have)
            counts = [blocks for blocks, _ in levels]
            assert counts == sorted(set(counts)) and all(servers for _, servers in levels)
            assert sum(servers.bit_count() for _, servers in levels) == len(
                {bit for _, servers in levels for bit in range(SERVERS) if servers >> bit & 1}
            )


class Counted(dict):
    """Counts the blocks that are looked for."""

    looked = 0

    def get(self, *args):
        self.looked += 1
        return super().get(*args)

    def __contains__(self, found):
        self.looked += 1
        return super().__contains__(found)


def test_a_look_up_of_a_long_prompt_takes_few_steps():
    holders, prompt = Holders(), names("a" * 200)
    for server in range(20):
        end = 10 * server + 5
        holders.gain(1 << server, prompt[:end] + names(f"{'a' * end}{server}")[end:], range(end + 1))
    for _ in range(2):
        holders._runs = counted = Counted(holders._runs)
        assert holders.levels(prompt) == [(10 * server + 5, 1 << server) for server in range(20)]
        # By halves to the last block that is known, then from run to run; the second time it knows the way.
        assert counted.looked <= 10 + 20
    assert counted.looked <= 10


def test_blocks_that_were_reported_become_runs_when_a_prompt_has_them():
    holders, prompt = Holders(), names("a" * 200)
    for server in range(20):
        for found in prompt[: 10 * server + 5]:
            holders.gain_one(1 << server, found)
    expected = [(10 * server + 5, 1 << server) for server in range(20)]
    counts = []
    for _ in range(3):
        holders._runs = counted = Counted(holders._runs)
        assert holders.levels(prompt) == expected
        counts.append(counted.looked)
        holders.settle(prompt)
    assert counts[0] > 100 and counts[1] <= 30 and counts[2] <= 10
