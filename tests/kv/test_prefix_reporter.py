"""Why a prompt was not reused further, against a search through everything that was ever cached."""

import collections
import itertools
import json
import random
import tracemalloc

import numpy as np
import pytest

from ksana_jax.core.lora import salted
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.core.prefix_report import CAUSES, read_sentence
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.prefix_reporter import NUM_SHOWN, PrefixReporter
from ksana_jax.kv.tier import DEVICE, HOST
from tests.fakes import asking, make_engine, prompt_of, run
from tests.kv.prefixes import cache, claim, pin, sequence
from tests.kv.test_disk_reads import Setup
from tests.random_simulations import simulate
from tests.simulation import Simulation

SIZE = 2
# As engines make them: (steering, adapter, salt of the request).
SALTS = {"": ("", "", ""), "b": ("", "", "b"), salted("x", ""): ("", "x", "")}
SALTS |= {salted("y", "b", "steering"): ("y", "", "b")}
# The second differs from the first from the second block on, the third everywhere.
SCOPES = (Scope("m", "", 99), Scope("m", "p", SIZE), Scope("n", "", 99))


class Tiers:
    """A listener: the blocks that tiers have, and those that they had, of which the last are remembered.

    A block is (model and salt, all blocks up to it), each as its tokens and the pattern that they are computed under.
    """

    def __init__(self, most: int):
        self.most, self.now, self.needed_by = most, 0.0, ""
        self.of_key = {}
        self.on = {DEVICE: set(), HOST: set()}
        self.gone = {}

    @property
    def cached(self):
        return self.on[DEVICE] | self.on[HOST]

    def stored(self, node, level):
        self.on[level].add(block := self.of_key[node.key])
        self.gone.pop(block, None)

    def dropped(self, node, level):
        self.on[level].remove(block := self.of_key[node.key])
        if block not in self.cached:
            self.gone[block] = self.now, self.needed_by
        if len(self.gone) > self.most:
            del self.gone[next(iter(self.gone))]

    def used(self, node):
        pass

    def cleared(self):
        self.gone |= {block: (self.now, "") for block in self.cached}
        self.on = {DEVICE: set(), HOST: set()}

    def knows(self, block):
        """Whether its key is known: of a cached block, one before it, or one that is remembered."""
        after = any(root == block[0] and blocks[: len(block[1])] == block[1] for root, blocks in self.cached)
        return after or block in self.gone


def ids_of(report) -> tuple[int, list[int], list[int]]:
    """Returns how many tokens a report shows before a difference, and both texts."""
    for text in (report.here, report.there):
        assert text.startswith("..." if report.position > NUM_SHOWN else "[") and text.endswith("]...")
    return min(report.position, NUM_SHOWN), *(json.loads(text.strip(".")) for text in (report.here, report.there))


class World:
    """A memory to which texts come and go, with a reporter, and prompts that ask it."""

    def __init__(self, rng: random.Random, most: int):
        self.rng, self.tiers = rng, Tiers(most)
        self.host = np.zeros((rng.choice([0, 0, 3]), 1), np.float32)
        self.memory = KVMemory(8, PrefixIndex(SIZE), caching=True, host_data=self.host, clock=lambda: self.tiers.now)
        self.reporter = PrefixReporter(self.memory, most)
        self.memory.listeners.append(self.tiers)
        self.set_scope(SCOPES[0])

    def set_scope(self, scope: Scope) -> None:
        self.scope = scope
        self.memory.set_layout(KVLayout(group_layers([FULL]), SIZE), scope)

    def blocks_of(self, text, salt):
        """Returns what the keys of a text depend on."""
        parts = [tuple(text[at : at + SIZE]) for at in range(0, len(text) - SIZE + 1, SIZE)]
        return (self.scope.model, salt), tuple(
            (part, self.scope.pattern * (SIZE * depth >= self.scope.full_until)) for depth, part in enumerate(parts)
        )

    def draw(self):
        """Returns a text of few different tokens, and a salt; notes what its keys stand for."""
        text = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 5 * SIZE))]
        root, blocks = self.blocks_of(text, salt := self.rng.choice(list(SALTS)))
        links = self.memory.index.chain(np.array(text), salt, [], len(blocks))
        self.tiers.of_key |= {link.key: (root, blocks[: depth + 1]) for depth, link in enumerate(links)}
        return text, salt

    def happen(self) -> str:
        """Something happens; returns the cause if a prompt asks."""
        self.tiers.now += 1
        memory, kind, cause = self.memory, self.rng.random(), ""
        seq = memory.device.needed_by = sequence([0])
        seq.request_id = self.tiers.needed_by = f"r{self.rng.randint(0, 3)}"
        if kind < 0.5:
            cache(memory, *self.draw())
        elif kind < 0.7:
            memory.device.release(memory.device.allocate(self.rng.randint(1, memory.blocks.num_available)))
        elif kind < 0.75:
            self.set_scope(self.rng.choice(SCOPES))
        elif kind < 0.76 and self.tiers.most > 100:
            memory.reset(self.host)
        else:
            cause = self.ask(*self.draw())
        memory.take_moves()
        memory.commit()
        return cause

    def ask(self, text, salt) -> str:
        """A prompt claims what it finds: its report is what a search finds. Returns the cause."""
        seq = sequence(text, salt, prompt_logprobs=self.rng.choice([None] * 9 + [0]))
        hit = pin(self.memory.prefixes, seq)
        expected, on_device = self.expected(text, salt, seq.max_cached_tokens), len(hit.nodes) - hit.num_loads
        self.memory.device.release(claim(self.memory.prefixes, seq, hit).ids)
        report = seq.kv.prefix_report
        assert report is not None
        assert report.num_by_tier.get("device", 0) == on_device * SIZE
        assert sum(report.num_by_tier.values()) == report.num_cached
        causes, others = expected.pop("causes", CAUSES), expected.pop("others", None)
        assert report.cause in causes
        assert {name: getattr(report, name) for name in expected} == expected
        assert (report.position is None) == (others is None)
        if others is not None:
            at, here, there = ids_of(report)
            shown = [other[report.position - at : report.position + NUM_SHOWN] for other in others]
            assert here == text[report.position - at : report.position + NUM_SHOWN]
            assert there[: at + 1] in [other[: at + 1] for other in shown]
            assert any(there == other[: len(there)] for other in shown)
        assert read_sentence(f"12:00 r1: {report}")[:3] == (report.cause, report.num_cached, report.num_tokens)
        return report.cause

    def expected(self, text, salt, most):
        (root, blocks), tiers, limit, count = self.blocks_of(text, salt), self.tiers, most // SIZE, 0
        upto = [(root, blocks[:end]) for end in range(limit + 1)]
        while count < limit and upto[count + 1] in tiers.cached:
            count += 1
        found = {"num_tokens": len(text), "num_cached": count * SIZE}
        if count == limit:
            return found | {"cause": "disabled" if most < len(text) - 1 and len(text) > SIZE else "partial_block"}
        known = count
        while known < limit and tiers.knows(upto[known + 1]):
            known += 1
        if known > count:
            at_s, name = next((tiers.gone[b] for b in upto[count + 1 : known + 1] if b in tiers.gone), (None, ""))
            since = None if at_s is None else tiers.now - at_s
            found |= {"cause": "evicted", "num_known": known * SIZE, "evicted_s": since, "evicted_for": name}
            return found
        tokens = [part for part, _ in blocks[:limit]]
        further = {
            other
            for other, longer in tiers.cached
            if len(longer) > count
            and [part for part, _ in longer] == tokens[: len(longer)]
            and all((other, longer[:end]) in tiers.cached for end in range(1, len(longer)))
        }
        if further:
            return found | {"causes": {self.cause_of(other, root) for other in further}}
        remembered = [longer for other, longer in {*tiers.cached, *tiers.gone} if other == root]
        same = {}
        for longer in remembered:
            if longer[:count] == blocks[:count] and len(longer) == count + 1 and longer[-1][0] != tokens[count]:
                same[longer] = next(i for i in range(SIZE) if longer[-1][0][i] != tokens[count][i])
        if not same or count * SIZE + max(same.values()) < 2:
            return found | {"cause": "never_seen"}
        position = max(same.values())
        # One of those that are as similar, with the block after it if that is remembered too.
        others = [longer for longer in remembered if same.get(longer[: count + 1]) == position]
        others = [list(itertools.chain.from_iterable(part for part, _ in longer)) for longer in others]
        return found | {"cause": "diverged", "position": count * SIZE + position, "others": others}

    def cause_of(self, other, root):
        *digests, salt = SALTS[other[1]]
        *digests2, salt2 = SALTS[root[1]]
        differ = [name for name, *both in zip(("steering", "adapter"), digests, digests2) if both[0] != both[1]]
        return "salt" if salt != salt2 else differ[0] if differ else "settings"


@pytest.mark.parametrize("most", [4, 10_000])
def test_reports_are_what_a_search_through_all_that_was_ever_cached_finds(most):
    seen = collections.Counter()
    for seed in range(6):
        world = World(random.Random(seed), most)
        mine = collections.Counter(filter(None, (world.happen() for _ in range(1500))))
        assert mine == world.reporter.num_requests
        seen += mine
    assert set(seen) == set(CAUSES) - {"window", "state", "not_read"} and min(seen.values()) > 1, seen


def reported(memory: KVMemory, text):
    seq = sequence(text)
    claim(memory.prefixes, seq)
    assert seq.kv.prefix_report is not None
    return seq.kv.prefix_report


def test_keys_are_known_further_than_layers_with_a_window_have_blocks():
    memory, text = KVMemory(16, PrefixIndex(SIZE), caching=True), prompt_of(8)
    window = AttentionPattern(window=2 * SIZE)
    memory.set_layout(KVLayout(group_layers([FULL, window]), SIZE), Scope())
    PrefixReporter(memory, 10)
    ids = memory.device.allocate(6).tolist()
    memory.prefixes.insert(sequence(text).kv, text, [ids[:4], [-1, -1, *ids[4:]]])
    report = reported(memory, [*text[: 3 * SIZE - 1], 10_000, 5])  # block 2 differs, and block 1 was not kept
    assert (report.cause, report.num_cached, report.num_known) == ("window", 0, 2 * SIZE)
    assert str(report) == "window: reused 0 of 7 tokens: 4 are known, but the cache has no more of layers with a window"
    assert reported(memory, [*text, 5]).num_cached == len(text)


def test_blocks_on_disk_that_come_too_late_are_named():
    setup = Setup(text := prompt_of(17))
    PrefixReporter(setup.memory, 10)
    seq = sequence(text)
    assert pin(setup.prefixes, seq).awaits
    setup.clock.now = 20.0
    assert setup.reads.ready(seq.kv)
    claim(setup.prefixes, seq)
    assert (seq.kv.prefix_report.cause, seq.kv.prefix_report.num_known) == ("not_read", 16)


def test_memory_is_bounded_by_the_blocks_that_are_remembered_and_cached():
    memory, most = KVMemory(64, PrefixIndex(16), caching=True), 2000
    reporter = PrefixReporter(memory, most)

    def work(first: int, count: int) -> None:
        for seed in range(first, first + count):
            cache(memory, prompt_of(16 * 32, seed))

    work(0, 100)
    tracemalloc.start()
    try:
        work(100, 200)  # every block that was remembered is forgotten
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reporter._dropped) == most
    assert sum(map(len, reporter._children.values())) <= most + 64 + 100
    print(f"{grown / most:,.0f} bytes for a dropped block")
    assert grown < 1000 * most


def test_the_request_that_needed_the_blocks_is_named_and_a_preempted_one_is_explained_once():
    engine = make_engine(num_blocks=16, max_num_seqs=2, caching=True, stored={"prefix_report_blocks": 100})
    first, other = prompt_of(21), prompt_of(21, 1)
    for prompt, name in ((first, "a"), (other, "b"), (first, "c"), (prompt_of(45, 2), "d"), (first, "e")):
        request = engine.add_request(prompt, asking(max_tokens=12), request_id=name)
        run(engine)
        report = request.output().prefix_report
        assert report is not None and report.num_cached == request.metrics.num_cached_tokens
        if name == "c":
            assert (report.cause, report.num_cached) == ("partial_block", 20)
    assert report.cause == "evicted" and report.evicted_for == "d", report
    both = [engine.add_request(prompt_of(24, seed), asking(max_tokens=30)) for seed in (8, 9)]
    before = engine.memory.prefixes.reporter.num_requests.total()
    run(engine)
    assert sum(request.metrics.num_preemptions for request in both)
    assert engine.memory.prefixes.reporter.num_requests.total() == before + 2
    assert engine.add_request(first, asking()).output().prefix_report is None


def test_without_a_cache_or_the_setting_there_is_no_report():
    for caching, stored in ((True, None), (False, {"prefix_report_blocks": 9})):
        engine = make_engine(caching=caching, stored=stored)
        request = engine.add_request(prompt_of(9), asking())
        run(engine)
        assert engine.memory.prefixes.reporter is None and request.output().prefix_report is None


class Reporting(Simulation):
    """A simulation whose prompts are explained."""

    def start(self):
        super().start()
        self.reporter = PrefixReporter(self.engine.memory, 6) if self.settings["caching"] else None

    def check_finished(self, request):
        super().check_finished(request)
        report, prompt = request.output().prefix_report, request.prompt_token_ids.tolist()
        assert (report is None) == (self.reporter is None)
        if report is None:
            return
        self.seen[report.cause] += 1
        assert (report.num_tokens, report.num_cached) == (len(prompt), request.metrics.num_cached_tokens)
        assert report.num_cached <= report.num_known <= len(prompt)
        if (position := report.position) is None or self.digest_bytes < 32:
            return
        assert report.num_cached <= position < report.num_cached + self.block_size
        at, here, there = ids_of(report)
        assert here == prompt[position - at : position + NUM_SHOWN]
        # Other requests have begun with the same tokens, and then had those that are shown.
        texts = [[*r.prompt_token_ids.tolist(), *tokens] for r, e in self.requests.items() for tokens in e.tokens]
        others = [text[position:] for text in texts if text[:position] == prompt[:position]]
        assert any(text[: len(there) - at] == there[at:] for text in others)
        assert there[at] != prompt[position]

    def check_step(self):
        super().check_step()
        if self.reporter is not None:
            counters = self.engine.memory.counters
            assert self.reporter.num_tokens.total() == counters.queried_tokens - counters.hit_tokens


def test_random_simulations_explain_every_prompt():
    seen = collections.Counter()
    for seed in range(30):
        seen += simulate(random.Random(seed), num_steps=40, kind=Reporting).seen
    assert {"partial_block", "evicted", "diverged", "never_seen", "salt", "disabled"} <= set(seen), seen
