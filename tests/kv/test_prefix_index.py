"""Keys equal a computation by hand; other content is never found, whatever its key."""

import hashlib

import numpy as np
import pytest

from ksana_jax.kv import prefix_index
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.tier import DEVICE
from tests.fakes import prompt_of

SIZE = 4


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def tokens(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def keys(index: PrefixIndex, text, salt: str = "") -> list[bytes]:
    text = np.asarray(text)
    return [link.key for link in index.chain(text, salt, [], len(text) // index.block_size)]


def insert(index: PrefixIndex, text, salt: str = ""):
    """All full blocks of a text, the last one on the device: its node, None where a key is taken."""
    node = index.root(salt)
    for link in index.chain(np.asarray(text), salt, [], len(text) // index.block_size):
        node = index.child(node, link.tokens, link.key)
        if node is None:
            return None
    node.at[DEVICE] = len(index)
    index.check()
    return node


def test_keys_are_a_chain_of_sha256_over_parent_and_tokens():
    index = PrefixIndex(SIZE, Scope(model="m"))
    root = sha(b"root", b"1:m", b"3:abc")
    first = sha(root, tokens(5, 6, 7, 8))
    second = sha(first, tokens(1, 2, 3, 4))
    assert keys(index, [5, 6, 7, 8, 1, 2, 3, 4], "abc") == [first, second]
    assert index.root("abc").key == root


def test_only_full_blocks_have_keys():
    index = PrefixIndex(SIZE, Scope())
    text = prompt_of(20)
    for length in range(13):
        assert keys(index, text[:length]) == keys(index, text)[: length // 4]


def test_a_chain_that_grows_is_the_chain_made_at_once():
    index = PrefixIndex(SIZE, Scope())
    text, links = prompt_of(32), []
    for count in (0, 1, 1, 4, 2, 8):
        assert index.chain(text, "", links, count) is links
    assert [link.key for link in links] == keys(index, text)
    assert b"".join(link.tokens for link in links) == text.tobytes()


def test_tokens_of_any_integer_type_have_the_same_keys():
    index = PrefixIndex(SIZE, Scope())
    text = prompt_of(12)
    assert keys(index, text.astype(np.int64)) == keys(index, text) == keys(index, np.repeat(text, 2)[::2])


def test_every_token_position_salt_and_model_has_a_say():
    index = PrefixIndex(SIZE, Scope(model="m"))
    text = prompt_of(12)
    base = keys(index, text)
    for at in range(12):
        other = text.copy()
        other[at] += 1
        same = [a == b for a, b in zip(base, keys(index, other), strict=True)]
        assert same == [depth < at // 4 for depth in range(3)]
    assert len(set(base + keys(index, np.roll(text, 4)))) == 6
    assert not set(base) & set(keys(index, text, "salt"))
    assert not set(base) & set(keys(PrefixIndex(SIZE, Scope(model="n")), text))


def test_model_and_salt_do_not_run_into_each_other():
    one, other = PrefixIndex(SIZE, Scope(model="a")), PrefixIndex(SIZE, Scope(model="ab"))
    assert one.root("bc").key != other.root("c").key
    assert one.root("é").key == sha(b"root", b"1:a", b"2:", "é".encode())


@pytest.mark.parametrize("full_until", [0, 3, 4, 7, 8, 9, 12, 2**30])
def test_the_pattern_joins_the_key_only_where_it_hides_something(full_until):
    text = prompt_of(16)
    full = keys(PrefixIndex(SIZE, Scope("m")), text)
    one = keys(PrefixIndex(SIZE, Scope("m", "window 9", full_until)), text)
    other = keys(PrefixIndex(SIZE, Scope("m", "window 8", full_until)), text)
    common = min(full_until // 4, 4)
    assert one[:common] == full[:common] == other[:common]
    assert len({*full[common:], *one[common:], *other[common:]}) == 3 * (4 - common)


def test_a_collision_is_none_and_never_the_other_content():
    index = PrefixIndex(SIZE, Scope(), digest=lambda data: sha(data)[:0])
    node = insert(index, [1, 2, 3, 4])
    root = index.root("")
    assert index.find(b"", root, tokens(1, 2, 3, 4)) is node
    assert index.find(b"", root, tokens(1, 2, 3, 5)) is None
    assert index.find(b"", node, tokens(1, 2, 3, 4)) is None  # the same tokens behind another text
    assert index.child(root, tokens(1, 2, 3, 5)) is None
    assert index.child(root, tokens(1, 2, 3, 4)) is node
    assert insert(index, [1, 2, 3, 4, 1, 2, 3, 4]) is None
    index.check()


def test_a_node_is_made_once_with_its_depth_and_cost():
    index = PrefixIndex(SIZE, Scope(), cost=lambda position: 1 + position)
    last = insert(index, prompt_of(12))
    assert insert(index, prompt_of(12)) is last and len(index) == 3
    assert (last.depth, last.cost, last.parent.cost) == (2, 9, 5)
    assert last.parent.num_children == 1 and index.root("").num_children == 1


def test_a_node_that_lies_nowhere_goes_with_all_that_led_only_to_it():
    index = PrefixIndex(SIZE, Scope())
    text = prompt_of(16)
    long = insert(index, text)
    short = insert(index, np.concatenate([text[:4], prompt_of(4, seed=1)]))
    assert len(index) == 5
    long.at[DEVICE] = -1
    index.drop_if_empty(long)
    index.check()
    assert len(index) == 2 and not long.known and short.known
    short.num_pins, short.at[DEVICE] = 1, -1  # a read in flight will bring it back
    index.drop_if_empty(short)
    assert short.known
    short.num_pins = 0
    index.drop_if_empty(short)
    assert len(index) == 0 and index.root("").num_children == 0


def test_a_dropped_node_is_revived_as_that_of_its_content():
    index = PrefixIndex(SIZE, Scope())
    old = insert(index, prompt_of(12))
    assert index.current(old) is old
    old.at[DEVICE] = -1
    index.drop_if_empty(old)
    new = insert(index, prompt_of(12)[:8])  # another request brings its first two blocks back
    again = index.current(old)
    assert again is not old and again.known and again.parent is new and again.key == old.key
    assert index.current(old) is again
    again.at[DEVICE] = 7
    index.check()


def test_a_node_whose_key_was_taken_since_is_not_revived():
    index = PrefixIndex(SIZE, Scope(), digest=lambda data: b"")
    old = insert(index, [1, 2, 3, 4])
    old.at[DEVICE] = -1
    index.drop_if_empty(old)
    insert(index, [9, 9, 9, 9])
    assert index.current(old) is None
    index.check()


def test_roots_without_blocks_are_forgotten_and_those_with_blocks_stay(monkeypatch):
    monkeypatch.setattr(prefix_index, "MAX_ROOTS", 8)
    index = PrefixIndex(SIZE, Scope())
    kept = insert(index, prompt_of(4), "tenant")
    for number in range(100):
        index.root(f"guest {number}")
        assert len(index.roots) <= 8
    assert insert(index, prompt_of(4), "tenant") is kept


def test_a_text_that_outlives_its_forgotten_root_is_found_by_those_who_come_later(monkeypatch):
    monkeypatch.setattr(prefix_index, "MAX_ROOTS", 2)
    index = PrefixIndex(SIZE, Scope("m"))
    held = index.root("mine")
    for salt in ("a", "b", "c"):
        index.root(salt)
    node = index.child(index.current(held), tokens(1, 2, 3, 4))
    node.at[DEVICE] = 0
    assert index.find(node.key, index.root("mine"), node.tokens) is node
    index.check()


def test_time_rises_with_every_tick():
    index = PrefixIndex(SIZE, Scope())
    assert [index.tick() for _ in range(3)] == [1, 2, 3]
    node = insert(index, prompt_of(4))
    assert node.inserted == node.last_use == 4


@pytest.mark.parametrize("harm", ["key", "half a block", "nowhere", "count", "orphan"])
def test_check_sees_a_tree_that_is_wrong(harm):
    index = PrefixIndex(SIZE, Scope())
    node = insert(index, prompt_of(12))
    index.check()
    if harm == "key":
        node.key = b"x"
    elif harm == "half a block":
        node.tokens = node.tokens[:8]
    elif harm == "nowhere":
        node.at[DEVICE] = -1
    elif harm == "count":
        node.parent.num_children += 1
    else:
        node.parent.known = False
    with pytest.raises(AssertionError):
        index.check()
