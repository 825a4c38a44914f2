"""Threads for text run calls, report their failures, and delay no shutdown."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from ksana_jax.engine.tokenizer_threads import TokenizerThreads


async def test_calls_return_or_raise():
    pool = TokenizerThreads()
    assert await asyncio.gather(*(pool.run(pow, n, 2) for n in range(9))) == [n * n for n in range(9)]
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    assert await pool.run(int, "11", base=2) == 3
    pool.close()


async def test_a_closed_pool_cancels_what_waits_and_refuses_more():
    pool, may_end = TokenizerThreads(num_threads=1), threading.Event()
    running, waiting = (asyncio.ensure_future(pool.run(may_end.wait, 10)) for _ in range(2))
    await asyncio.sleep(0.01)
    pool.close()
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(RuntimeError, match="have shut down"):
        await pool.run(print)
    may_end.set()
    assert await running


async def test_a_cancelled_call_that_waits_is_not_made():
    pool, may_end, made = TokenizerThreads(num_threads=1), threading.Event(), []
    running, waiting = (asyncio.ensure_future(pool.run(call)) for call in (may_end.wait, lambda: made.append(1)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_end.set()
    await running
    await pool.run(len, "")
    assert not made
    pool.close()


def test_a_pool_that_is_dropped_ends_its_threads():
    pool = TokenizerThreads(num_threads=1)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "ksana-text-0"][-1:]
    found = weakref.ref(pool)
    del pool
    gc.collect()
    thread.join(10)
    assert found() is None and not thread.is_alive()


def test_a_process_ends_while_a_text_is_read():
    code = """
import asyncio, threading
from ksana_jax.engine.tokenizer_threads import TokenizerThreads

async def run():
    pool = TokenizerThreads()
    asyncio.ensure_future(pool.run(threading.Event().wait))
    await asyncio.sleep(0.01)
    pool.close()

asyncio.run(run())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
