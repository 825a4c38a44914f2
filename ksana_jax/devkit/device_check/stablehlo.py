"""Lists the StableHLO operations that the engine's programs have: `python -m ksana_jax.devkit.device_check.stablehlo`.

They are those of all programs that the loopback is given while ksana-tiny generates greedily, with sampling and with
beams.
"""

from __future__ import annotations

import json
import subprocess
import sys

DEVICE = {"platform": "npu", "plugin": "loopback"}


def engine_operations() -> dict[str, list[str]]:
    """Returns {operation: element types} of an engine in bfloat16, from a process of its own."""
    command = [sys.executable, "-m", "ksana_jax.devkit.device_check.stablehlo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the operations as one line of JSON."""
    from ksana_jax.devices.loopback.plugin import registered
    from ksana_jax.devices.starting import use_device

    use_device(DEVICE)
    plugin = registered[DEVICE["platform"]]
    plugin.records = True
    from ksana_jax.core.request import SamplingParams
    from ksana_jax.engine.llm import LLM

    llm = LLM("ksana-tiny", dtype="bf16", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=32)
    llm.generate(["def main(" * 20, "import os\n"], SamplingParams(temperature=0, max_tokens=3))
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1, max_tokens=3, logprobs=2)
    llm.generate("def main(", sampled)
    llm.generate("def main(", SamplingParams(beam_width=2, max_tokens=4))
    print(json.dumps({name: sorted(types) for name, types in sorted(plugin.operations.items())}))


if __name__ == "__main__":
    main()
