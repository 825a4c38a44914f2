"""Withholds each function of the PJRT C API, and each operation of StableHLO, one at a time from an engine on the
loopback: does it run, and if not, what does it say?

`python -m ksana_jax.devkit.device_check.withheld stablehlo.sort,stablehlo.case Device_MemoryStats` prints it as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ksana_jax.devices.loopback.operations import DYNAMIC_WHILE

PLATFORM = "npu"
RUNS, RUNS_WITH_RBG, ENDS = "runs", "runs, with other random numbers (rbg)", "the process ends"
# What the engine is asked for: eight tokens each.
ASKED = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1}}
SECONDS = 120.0
# jaxlib's last words.
_FATAL = re.compile(r"^F\d{4} .*?\] (.*)$", re.M)


def device(**options: Any) -> dict[str, Any]:
    """Returns the setting `device` of a loopback."""
    return {"platform": PLATFORM, "plugin": "loopback", "options": options}


def outcomes(expected: dict[str, Any] | None) -> dict[str, Any]:
    """Runs an engine on the device of this process.

    Args:
      expected: tokens, by name of `ASKED`.

    Returns:
      For each of `ASKED` whether it runs, or one line with the error; the tokens if none are expected.
    """
    import jax

    from ksana_jax.core.request import SamplingParams
    from ksana_jax.devices.capabilities import features
    from ksana_jax.engine.llm import LLM

    found: dict[str, Any] = {}
    llm = None
    for name, settings in ASKED.items():
        try:
            llm = llm or LLM("ksana-tiny", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, num_blocks=8)
            params = SamplingParams(max_tokens=8, ignore_eos=True, **settings)
            tokens = list(llm.generate("def main(", params)[0].outputs[0].token_ids)
        except Exception as error:  # whatever a device that lacks something raises
            found[name], llm = line(error), None
            continue
        if expected is None or tokens == expected[name]:
            found[name] = tokens if expected is None else RUNS
        elif name == "sampled" and features(jax.devices()[0]).generator == "rbg":
            found[name] = RUNS_WITH_RBG
        else:
            found[name] = f"gives other tokens: {tokens}"
    return found


def line(error: BaseException) -> str:
    """Returns an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def without_operations(names: Iterable[str] | None = None) -> dict[str, dict[str, str]]:
    """Withholds operations from engines of this process, which jax has not started in.

    Programs without an operation are the same as before, and are compiled once.

    Args:
      names: operations; None takes all that the engine's programs have.

    Returns:
      {operation: see `outcomes`}.
    """
    import jax

    from ksana_jax.devices import capabilities
    from ksana_jax.devices.loopback.plugin import registered
    from ksana_jax.devices.starting import use_device

    use_device(device())
    plugin = registered[PLATFORM]
    plugin.records, plugin.programs = True, {}
    jax.config.update("jax_disable_most_optimizations", True)
    expected = outcomes(None)
    everything = plugin.options
    found = {}
    for name in operations_of_engines(plugin) if names is None else names:
        jax.clear_caches()
        for answer in (capabilities._found, capabilities._features, capabilities._converts_pool):
            answer.cache_clear()
        plugin.options = dataclasses.replace(everything, lacks_operations=(name,))
        found[name] = outcomes(expected)
    plugin.options = everything
    return found


def without_operations_in_a_process(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns `without_operations` of a process of its own; jax must not have started in this one."""
    return _forked(without_operations, list(names))


def operations_of_engines(plugin: Any) -> list[str]:
    """Returns the operations of StableHLO of all programs of a plugin so far."""
    return sorted(name for name in plugin.operations if name.startswith("stablehlo.") or name == DYNAMIC_WHILE)


def without_functions(names: Iterable[str] | None = None) -> dict[str, dict[str, str]]:
    """Withholds functions of the PJRT C API from engines, each in a process of its own.

    Args:
      names: functions; None takes all that an engine calls.

    Returns:
      {function: see `outcomes`}; of a function without which jaxlib ends the process, how it ended.
    """
    import ksana_jax.engine.llm  # noqa: F401  imported once, for all processes that are forked

    # In a process of its own, too: a process in which jax has started must not be forked.
    expected, called = _forked(_with_everything)
    wanted = sorted(called) if names is None else names
    return {name: _forked(_without_function, name, expected) for name in wanted}


def _with_everything() -> tuple[dict[str, Any], list[str]]:
    from ksana_jax.devices.loopback.plugin import registered

    _start()
    return outcomes(None), list(registered[PLATFORM].calls)


def _without_function(name: str, expected: dict[str, Any]) -> dict[str, Any]:
    try:
        _start(lacks=[name])
    except Exception as error:  # of `use_device`
        return dict.fromkeys(ASKED, line(error))
    return outcomes(expected)


def _start(**options: Any) -> None:
    import jax

    from ksana_jax.devices.starting import use_device

    warnings.simplefilter("ignore")
    use_device(device(**options))
    jax.config.update("jax_disable_most_optimizations", True)


def _forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a forked process; returns what it returns, or `outcomes` with how the process ended."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as errors:

        def run() -> None:
            os.dup2(errors.fileno(), 2)
            there.send(function(*arguments))

        process = context.Process(target=run)
        process.start()
        there.close()
        try:
            if here.poll(SECONDS if function is _without_function else None):
                return here.recv()
            ended = f"hangs: nothing after {SECONDS:g} s"
            process.kill()
        except EOFError:
            process.join()
            ended = f"{ENDS} (signal {-(process.exitcode or 0)})"
        finally:
            process.join()
        errors.seek(0)
        if said := _FATAL.search(errors.read().decode(errors="replace")):
            ended += f": {said[1].strip()}"
        return dict.fromkeys(ASKED, ended)


def main(operations: list[str], functions: list[str]) -> None:
    """Prints what becomes of requests without each of some operations and functions, as one line of JSON."""
    logging.disable(logging.WARNING)
    import ksana_jax.engine.llm  # noqa: F401  as above

    # Each in a process that is forked before jax starts.
    print(json.dumps([without_operations_in_a_process(operations), without_functions(functions)]))


if __name__ == "__main__":
    main(*(text.split(",") for text in sys.argv[1:]))
