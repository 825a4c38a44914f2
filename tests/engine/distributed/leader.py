"""Processes of the jobs in `test_processes`, as a module with SCENARIO MODEL ADDRESS. Prints JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.errors import JobError
from ksana_jax.engine.distributed.worker import start

# Engines that compile one shape of steps. Their pool of 9 blocks of 4 tokens has no room for two of the requests.
SETTINGS: dict[str, Any] = {
    "dtype": "f32",
    "block_size": 4,
    "num_blocks": 9,
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 2,
    "query_tile": 1,
    "operators": {"attention": "xla", "linear": "xla"},
}
TIERS = {"enable_prefix_caching": True, "host_cache_bytes": 2**17, "preempt": "swap"}
PROMPTS = [{"prompt_token_ids": [7 * i + k for k in range(n)]} for i, n in enumerate((1, 9, 13, 11))]


def asked(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "detokenize": False} | given)


MIXED = [
    asked(temperature=0, logprobs=2),
    asked(temperature=1.0, seed=1, top_p=0.9),
    asked(temperature=0, repetition_penalty=1.3, logit_bias={4: 2.0, 299: 1.0}),
    asked(temperature=1.5, seed=4),
]


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def engines(model: str, address: str, **settings: Any):
    """The same engine on both processes and on this one alone."""
    distributed = {"coordinator_address": address, "num_processes": 2, "process_id": 0, "initialization_timeout": 60}
    yield LLM(model, tensor_parallel_size=2, distributed=distributed, **SETTINGS | settings)
    yield LLM(model, **SETTINGS | settings)


def tokens(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    llm.engine.scheduler.check()
    return [c.token_ids for o in outputs for c in o.outputs]


def everything(model: str, address: str) -> None:
    several, one = engines(model, address, **TIERS)
    host = several.runner.host_blocks
    for _ in range(2):  # the second time from the cache
        say(several=tokens(several, MIXED), one=tokens(one, MIXED))
    counters = several.engine.memory.counters
    say(preempted=several.records[-1].num_preemptions, saved=counters.saved, loaded=counters.loaded)
    say(block_bytes=[llm.runner.host_blocks.shape[1] for llm in (several, one)], filled=bool(host.any()))
    for params in (asked(beam_width=2, max_tokens=6), asked(n=2, temperature=1.0, seed=3)):
        say(several=tokens(several, params, PROMPTS[:2]), one=tokens(one, params, PROMPTS[:2]))
    for llm in (several, one):
        llm.set_pattern({"window": 6})
    say(several=tokens(several, asked(temperature=0)), one=tokens(one, asked(temperature=0)))
    several.close()
    # Another engine of the same job, whose steps share calls and are compiled before.
    several = next(engines(model, address, num_scheduler_steps=4))
    one.set_pattern(None)
    several.warm_up(sampling_params=asked(temperature=0))
    compiled = several.num_compilations
    say(several=tokens(several, asked(temperature=0)), one=tokens(one, asked(temperature=0)))
    say(compiled_later=several.num_compilations - compiled)


def forever(model: str, address: str) -> None:
    several = next(engines(model, address))
    say(running=True, several=tokens(several, asked(temperature=0)))
    while True:
        try:
            tokens(several, asked(temperature=0))
        except JobError as error:
            say(error=str(error), at=time.time())
            try:  # at once, and with the same words
                tokens(several, asked(temperature=0))
            except JobError as again:
                say(again=str(again))
            return


def running(model: str, address: str, process_id: str) -> None:
    """A program of all processes in which jax.distributed runs before it makes an engine."""
    import jax

    jax.distributed.initialize(address, 2, int(process_id))
    say(devices=jax.device_count())
    several = LLM(model, tensor_parallel_size=2, distributed="auto", **SETTINGS)
    one = LLM(model, **SETTINGS)
    say(several=tokens(several, MIXED), one=tokens(one, MIXED))


def spmd(model: str, address: str, process_id: str, seed: str) -> None:
    """An SPMD program, whose processes make the same calls, if their seeds of the last one are the same."""
    import jax

    jax.distributed.initialize(address, 2, int(process_id))
    several = LLM(model, tensor_parallel_size=2, distributed="spmd", **SETTINGS)
    one = LLM(model, **SETTINGS) if process_id == "0" else several
    found = tokens(several, MIXED)
    say(several=found, one=tokens(one, MIXED) if process_id == "0" else found)
    try:
        tokens(several, asked(temperature=1.0, seed=int(seed)))
    except JobError as error:
        say(error=str(error))


def follow(model: str, address: str, *own: str) -> None:
    """Another process than 0, with process 0's model and settings, or its own."""
    distributed = {"coordinator_address": address, "num_processes": 2, "process_id": 1, "initialization_timeout": 60}
    if own:
        LLM(model, tensor_parallel_size=2, distributed=distributed, **SETTINGS)
    start(distributed)


if __name__ == "__main__":
    {"follow": follow, "everything": everything, "forever": forever, "running": running, "spmd": spmd}[sys.argv[1]](
        *sys.argv[2:]
    )
