"""Whatever is written, read, damaged and restarted, a block reads as written."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ksana_jax.kv.disk.tier import DiskTier
from tests.kv.disk.blocks import FORMAT, AtOnce, chain
from tests.kv.disk.tiers import FILE, assert_books, flip, read, write

BLOCKS = [*chain(4, "a"), *chain(3, "b"), *chain(2, "c", parent=chain(2, "a")[-1].key)]
ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, len(BLOCKS) - 1), st.integers(0, 9)),
    st.tuples(st.just("read"), st.integers(0, len(BLOCKS) - 1), st.just(0)),
    st.tuples(st.sampled_from(["cut", "flip"]), st.integers(0, len(BLOCKS) - 1), st.integers(0, 10**6)),
    st.tuples(st.just("swap"), st.integers(0, len(BLOCKS) - 1), st.integers(0, len(BLOCKS) - 1)),
    st.tuples(st.just("restart"), st.just(0), st.integers(0, 9)),
)


@settings(max_examples=120)
@given(budget=st.integers(0, 10), actions=st.lists(ACTIONS, max_size=40))
def test_what_is_read_is_always_what_was_written(tmp_path_factory, budget, actions):
    folder = tmp_path_factory.mktemp("disk")
    told, content, damaged = [], {}, set()

    def start(budget):
        return DiskTier(folder, FORMAT, budget * FILE + 20, executor=AtOnce(), warn=told.append)

    tier = start(budget)
    for action, number, what in actions:
        facts = BLOCKS[number]
        path, there = tier._path(facts.key), facts.key in tier
        if action == "write":
            write(tier, facts, generation=what)
            if not there:
                content[facts.key] = what
        elif action == "read":
            assert read(tier, facts, content.get(facts.key, 0)) == (there and facts.key not in damaged)
        elif action == "restart":
            tier.close()
            (folder / tier.folder.name / f"{'0a' * 32}.tmp").write_bytes(b"left")
            tier = start(what)
        elif there:
            old = path.read_bytes()
            if action == "cut":
                path.write_bytes(old[: what % len(old)])
            elif action == "flip":
                path.write_bytes(flip(what % len(old))(old))
            elif BLOCKS[what].key in tier:
                path.write_bytes(tier._path(BLOCKS[what].key).read_bytes())
            if path.read_bytes() != old:
                damaged.add(facts.key)
        damaged &= set(tier.keys())
        if not damaged:
            assert_books(tier)
        assert tier.enabled
    for facts in BLOCKS:
        there = facts.key in tier and facts.key not in damaged
        assert read(tier, facts, content.get(facts.key, 0)) == there
    assert_books(tier)
    tier.close()
