"""Zeros that take memory when they are written to."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.native.build import library
from ksana_jax.native.zeros import lazy_zeros
from tests.machine import compiled, no_compiler

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 64 * 2**10  # of ksana-tiny
ENGINE = """
import json
import sys
from ksana_jax import LLM, SamplingParams
from tests.loading.memory_probe import memory
llm = LLM("ksana-tiny", num_blocks=int(sys.argv[1]), max_num_seqs=1, max_model_len=64, enable_prefix_caching=False)
def tokens():
    [output] = llm.generate(["The cat"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    return output.outputs[0].token_ids
sizes, found = [memory("VmRSS")], [tokens()]
llm.sleep()
llm.wake_up()
sizes.append(memory("VmRSS"))
found.append(tokens())
print(json.dumps([llm.memory_plan.pool_bytes, sizes, found]))
"""


def engine(**environment: str) -> tuple[int, list[int], list[list[int]]]:
    """Bytes of the pool of an engine in another process, and its memory and tokens before and after it has slept."""
    command = [sys.executable, "-c", ENGINE, str(2**30 // BLOCK_BYTES)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


@compiled
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (4096,), (4097,), (3, 12_289), (2**22 + 7,)])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_zeros_are_zeros_in_memory_that_has_been_used(shape, dtype):
    for _ in range(3):
        np.testing.assert_array_equal(lazy_zeros(shape, dtype), np.zeros(shape, dtype), strict=True)
        used = jnp.full(shape, 7, dtype)  # its memory is the next one's
        del used


@compiled
def test_zeros_are_donated_where_they_are():
    pool = lazy_zeros((2**22,), "uint16")
    place = pool.unsafe_buffer_pointer()
    written = jax.jit(lambda pool: pool.at[5].set(3), donate_argnums=0)(pool)
    assert pool.is_deleted() and written.unsafe_buffer_pointer() == place
    assert (int(written[5]), int(written.sum())) == (3, 3)


@compiled
def test_memory_that_keeps_its_bytes_is_written():
    zero = ctypes.CDLL(str(library()))._ZN5ksana4ZeroEPcl  # void ksana::Zero(char*, int64_t)
    zero.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    with mmap.mmap(-1, 5 * mmap.PAGESIZE) as shared:  # which madvise leaves as it is
        shared.write(b"\7" * len(shared))
        view = (ctypes.c_char * len(shared)).from_buffer(shared)
        zero(ctypes.addressof(view) + 3, len(shared) - 5)
        assert bytes(view) == b"\7\7\7" + bytes(len(shared) - 5) + b"\7\7"
        del view


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_the_pool_of_an_engine_takes_memory_with_its_first_tokens():
    pool, written, wanted = engine(KSANA_HIDE="compiler")
    assert wanted[0] == wanted[1] and pool == 2**30 < min(written)
    if no_compiler is None:
        _, lazy, found = engine()
        # Python, jax and a small model take a quarter of a GiB.
        assert found == wanted and max(lazy) < pool // 2
