"""Snapshots of rows are found by their whole text and settings, as long as the pool holds all their blocks."""

from typing import Any

import numpy as np

from ksana_jax.core.patterns import FULL
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import check_memory
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.state import HeldBlocks, KVState
from ksana_jax.methods.eviction.h2o import H2O

TEXT = np.arange(30, dtype=np.int32)


def make_memory(num_blocks=8, **settings):
    memory = KVMemory(num_blocks, PrefixIndex(4), caching=True, **settings)
    set_budget(memory, 8)
    return memory


def set_budget(memory, budget, prompts: Any = "streamed"):
    method = H2O(budget=budget, prompts=prompts)
    schedule = EvictionSchedule(method, (1.0,), 4)
    memory.set_layout(KVLayout(group_layers([FULL], [1.0]), 4, eviction=schedule), Scope("model"))


def keep(memory, length, count=2, salt="", num_context=30):
    """Caches `count` blocks as what a row is left with after so many tokens, and leaves the row."""
    ids = memory.device.allocate(count)
    held = HeldBlocks(ids, 4 * np.arange(count, dtype=np.int32), np.zeros(count, np.intp), length)
    held = held._replace(num_evicted=np.array([length - 4 * count]))
    found = memory.prefixes.snapshots.keep(KVState(salt), TEXT[:length], num_context, held)
    memory.device.release(ids)
    check_memory(memory, [])
    return found


def found(memory, text=TEXT, salt="", num_context=30):
    hit = memory.prefixes.snapshots.find(KVState(salt), text, num_context)
    return None if hit is None else hit[0]


def test_the_longest_beginning_of_a_text_is_found_and_no_other():
    memory = make_memory()
    assert keep(memory, 11) and keep(memory, 17) and not keep(memory, 17)
    assert [found(memory, TEXT[:length]) for length in (10, 11, 16, 17, 30)] == [None, 11, 11, 17, 17]
    assert found(memory, TEXT[::-1]) is None and found(memory, salt="other") is None


def test_the_length_of_a_prompt_counts_where_evictions_depend_on_it():
    memory = make_memory()
    keep(memory, 11)
    assert found(memory, num_context=20) == 11
    set_budget(memory, 8, "whole")
    keep(memory, 12, num_context=11)
    assert found(memory, num_context=20) is None and found(memory, num_context=11) == 12
    set_budget(memory, 9, "whole")
    assert found(memory, num_context=11) is None
    set_budget(memory, 8)
    assert found(memory) == 11, "the blocks are still there"


def test_a_snapshot_that_has_lost_a_block_gives_way_to_a_shorter_one():
    memory = make_memory(num_blocks=4)
    keep(memory, 17)
    keep(memory, 11)
    memory.device.release(memory.device.allocate(1))
    assert found(memory) == 11 and memory.counters.replaced == 1
    assert keep(memory, 17), "it can be taken again"
    check_memory(memory, [])


def test_blocks_that_the_host_has_are_enough():
    memory = make_memory(num_blocks=4, host_data=np.zeros((4, 1)))
    keep(memory, 17)
    memory.device.release(memory.device.allocate(4))
    memory.take_moves()
    memory.commit()
    assert found(memory) == 17 and not memory.device.node_of


def test_lost_snapshots_are_forgotten_however_many_there_were():
    memory = make_memory(num_blocks=2)
    for number in range(300):
        keep(memory, 11, salt=str(number))
    assert found(memory, salt="299") == 11 and len(memory.index) == 2
    assert len(vars(memory.prefixes.snapshots)["_of"]) <= 67
