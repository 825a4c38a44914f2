"""Withholds each function of the PJRT C API, and each operation of StableHLO, one at a time from an engine on the
loopback, and records whether it runs, or its error.

Each engine runs in a separate process, forked from one that has imported all modules but not started jax.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

RUNS, RUNS_WITH_RBG, ENDS = "runs", "runs, with other random numbers (rbg)", "the process ends"
# Requests to the engine: eight tokens each.
ASKED = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1}}
SECONDS = 120.0
# jaxlib's last words.
_FATAL = re.compile(r"^F\d{4} .*?\] (.*)$", re.M)
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["ksana_jax.engine.llm"])


def without(option: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Withholds functions or operations from engines, one at a time.

    Args:
      option: "lacks" or "lacks_operations", see `LoopbackOptions`. names: what is withheld.

    Returns:
      {name: {name in `ASKED`: whether it runs, or one line with the error}}.
    """
    expected = _apart(_tokens)
    assert isinstance(expected, dict), expected
    found = {}
    for name in names:
        outcomes = _apart(_outcomes, {option: [name]}, expected)
        found[name] = outcomes if isinstance(outcomes, dict) else dict.fromkeys(ASKED, outcomes)
    return found


def called_functions() -> list[str]:
    """Returns the functions of the PJRT C API that jaxlib calls for an engine, in alphabetical order."""
    return _apart(_called)


def engine_operations() -> dict[str, list[str]]:
    """Returns {operation: element types} of all programs of an engine in bfloat16 that searches greedily and by beams,
    and samples."""
    return _apart(_operations)


def _start(**options: Any) -> None:
    import jax

    from ksana_jax.devices.starting import use_device

    warnings.simplefilter("ignore")
    from tests.loopback import setting

    use_device(setting(**options))
    jax.config.update("jax_disable_most_optimizations", True)


def _engine() -> Any:
    from ksana_jax.engine.llm import LLM

    return LLM("ksana-tiny", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, num_blocks=8)


def _generated(llm: Any, name: str) -> list[int]:
    from ksana_jax.core.request import SamplingParams

    params = SamplingParams(max_tokens=8, ignore_eos=True, **ASKED[name])
    return list(llm.generate("def main(", params)[0].outputs[0].token_ids)


def _tokens() -> dict[str, list[int]]:
    _start()
    llm = _engine()
    return {name: _generated(llm, name) for name in ASKED}


def _called() -> list[str]:
    from tests.loopback.wrapper import FUNCTIONS, opened

    _tokens()
    return sorted(name for name in FUNCTIONS if opened[-1].calls(name))


def _operations() -> dict[str, list[str]]:
    from ksana_jax.core.request import SamplingParams
    from ksana_jax.engine.llm import LLM
    from tests.loopback.wrapper import opened

    _start()
    opened[-1].records = True
    llm = LLM("ksana-tiny", dtype="bf16", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=32)
    llm.generate(["def main(" * 20, "import os\n"], SamplingParams(temperature=0, max_tokens=3))
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1, max_tokens=3, logprobs=2)
    llm.generate("def main(", sampled)
    llm.generate("def main(", SamplingParams(beam_width=2, max_tokens=4))
    return {name: sorted(types) for name, types in sorted(opened[-1].operations.items())}


def _outcomes(options: dict[str, list[str]], expected: dict[str, list[int]]) -> dict[str, str] | str:
    import jax

    from ksana_jax.devices.capabilities import features

    try:
        _start(**options)
    except Exception as error:  # any error of a limited device, here and below
        return _line(error)
    found, llm = {}, None
    for name in ASKED:
        try:
            llm = llm or _engine()
            tokens = _generated(llm, name)
        except Exception as error:
            found[name], llm = _line(error), None
            continue
        if tokens == expected[name]:
            found[name] = RUNS
        elif name == "sampled" and features(jax.devices()[0]).generator == "rbg":
            found[name] = RUNS_WITH_RBG
        else:
            found[name] = f"gives other tokens: {tokens}"
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a separate process; returns its result, or a line that describes the process's end."""
    here, there = _PROCESSES.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as errors:
        process = _PROCESSES.Process(target=_send, args=(there, errors.name, function, arguments))
        process.start()
        there.close()
        try:
            if here.poll(SECONDS):
                return here.recv()
            ended = f"hangs: nothing after {SECONDS:g} s"
            process.kill()
        except EOFError:
            process.join()
            ended = f"{ENDS} (signal {-(process.exitcode or 0)})"
        finally:
            process.join()
        said = _FATAL.search(errors.read().decode(errors="replace"))
        return f"{ended}: {said[1].strip()}" if said else ended


def _send(there: Any, errors: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    there.send(function(*arguments))
