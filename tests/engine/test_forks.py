"""Forked children of a process with an engine: one that uses the engine gets the reason why it cannot, one that ends
leaves everything to its parent."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

COMMON = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")  # jax and Python warn of forks
from ksana_jax import AsyncLLM, LLM, SamplingParams

signal.alarm(120)
GREEDY = SamplingParams(max_tokens=2, temperature=0)
SETTINGS = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, num_blocks=16)

def status(child):
    "Exit status of a forked child that runs a function and ends as a Python program does."
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(function, *arguments, **settings):
    try:
        function(*arguments, **settings)
    except RuntimeError as error:
        words = f"in process {os.getppid()} and cannot be used in its forked child {os.getpid()}, because jax does"
        assert words in str(error), error
    else:
        raise AssertionError(f"{function} was not refused")
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + textwrap.dedent(code), *arguments],
        env=os.environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0 and not done.stderr and done.stdout == "end\n", done.stdout + done.stderr


def test_a_child_of_a_process_with_an_engine_cannot_use_it_and_can_end(tmp_path):
    run(
        """
        import multiprocessing
        from pathlib import Path

        tier = dict(enable_prefix_caching=True, host_cache_bytes=2**20, disk_cache_bytes=2**22)
        with LLM("ksana-tiny", **SETTINGS, **tier, disk_cache_dir=sys.argv[1]) as llm:
            tokens = llm.generate("def f", GREEDY)[0].outputs[0].token_ids
            [lock] = Path(sys.argv[1]).rglob("lock")

            def uses():
                refused(llm.generate, "def f", GREEDY)
                refused(llm.stream, "def f", GREEDY)
                refused(llm.warm_up)
                refused(llm.engine.step)
                refused(LLM, "ksana-tiny")

            assert status(uses) == 0
            assert status(lambda: None) == 0
            assert status(llm.close) == 0
            assert status(lambda: sys.exit(3)) == 3
            child = multiprocessing.get_context("fork").Process(target=uses)
            child.start()
            child.join()
            assert child.exitcode == 0
            for _ in llm.stream("def g", GREEDY):
                assert status(lambda: None) == 0  # and drops the stream
            assert lock.read_text() == f"{os.getpid()}\\n"
            assert llm.generate("def f", GREEDY)[0].outputs[0].token_ids == tokens
        print("end")
        """,
        str(tmp_path),
    )


def test_a_child_of_a_process_with_an_engine_of_tasks_cannot_use_it_and_can_end():
    run(
        """
        import asyncio

        async def all_of(stream):
            return [output async for output in stream]

        llm = AsyncLLM("ksana-tiny", **SETTINGS)
        asyncio.run(all_of(llm.generate("def f", GREEDY)))

        def in_child():
            refused(asyncio.run, all_of(llm.generate("def f", GREEDY)))
            refused(asyncio.run, llm.abort("0"))
            asyncio.run(llm.aclose())
            llm.close()

        assert status(in_child) == 0
        assert status(lambda: None) == 0

        asyncio.run(llm.aclose())
        print("end")
        """
    )


def test_a_child_that_was_forked_before_jax_started_has_an_engine_of_its_own():
    run(
        """
        def serves():
            assert len(LLM("ksana-tiny", **SETTINGS).generate("def f", GREEDY)[0].outputs[0].token_ids) == 2

        assert status(serves) == 0
        print("end")
        """
    )
