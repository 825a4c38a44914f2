"""Predicts whole programs, such as a step of a model: each of their launches, and the gaps between them.

Kernels of Pallas take what `predict` and `grids` say, XLA's own small kernels what their machine code takes, products
of matrices their bytes or their operations: which kernels XLA takes for these, it finds out on a GPU, by timing them.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot import report as compiled
from pallas_kernels.speed import parts, pipes, sass
from pallas_kernels.speed.chip import H200, Chip
from pallas_kernels.speed.grids import Tokens
from pallas_kernels.speed.launches import Launch, num_bytes, read_launches
from pallas_kernels.speed.predict import Attention, Machine, Prediction

# Of kernels of Pallas, by what stands in their scope; they name a term each.
ATTENTION, MERGE, WRITE = "attention", "merge", "write"
# Embedding, angles of the rope, last norm.
PRODUCTS, ONCE = "products", "others of a step"
_SCOPES = {"hopper_attention": ATTENTION, "hopper_merge": MERGE, "kv_write": WRITE}


@dataclasses.dataclass(frozen=True)
class Program:
    """How a whole program is predicted.

    Args:
      name: of the shape. lengths: of its rows of one query each.
      attention, write: models of its kernels, None where it has none; theirs are named "attention", "merge", "write".
      terms: other names of the terms PRODUCTS and ONCE, if it is no step.
      host_us: what the host takes for a step, in microseconds, measured. aim_ms: of a whole step.
    """

    name: str
    lengths: tuple[int, ...]
    attention: Attention | None = None
    write: Tokens | None = None
    terms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    host_us: float = 0.0
    aim_ms: float | None = None

    def predict(self, code: Code, chip: Chip) -> Prediction:
        """Predicts the program; terms are in microseconds, and all of them are added."""
        terms: dict[str, float] = defaultdict(float)
        repeated = Counter(launch.alike for launch in code.launches)
        layers = max(
            (n for n in Counter(launch.pallas for launch in code.launches if launch.pallas).values()), default=1
        )
        num_bytes, of_pallas = 0.0, self._of_pallas(code, chip)
        for launch in code.launches:
            if launch.pallas:
                name = _kind(launch)
                terms[name] += of_pallas[name]
                continue
            if launch.product:
                name, us = PRODUCTS, product_us(launch, chip)
                num_bytes += launch.argument_bytes
            else:
                # What every layer has, maybe but for the first and the last one.
                in_layers = 2 * repeated[launch.alike] > layers > 1
                name = (
                    "small kernels of layers" if in_layers else "work list" if "/attention/" in launch.scope else ONCE
                )
                us = own_us(launch, code.machines.get(launch.kernel), chip)
            terms[self.terms.get(name, name)] += us
        terms["gaps"] = chip.launch_us * len(code.launches)
        us = sum(terms.values())
        if self.attention is not None:
            num_bytes += layers * self.attention.num_bytes(self.lengths)
        share = num_bytes / (us * 1e-6) / chip.copy_bytes_per_s
        return Prediction(self.name, us, max(terms, key=lambda name: terms[name]), dict(terms), share)

    def _of_pallas(self, code: Code, chip: Chip) -> dict[str, float]:
        """Microseconds of a launch of each kernel of Pallas, without the gap before it."""
        found = {}
        if self.attention is not None:
            whole = self.attention.of_shape("", self.lengths, code.machines, chip).terms
            found[MERGE] = whole["merge"]
            found[ATTENTION] = max(whole["memory"], whole["compute"]) + whole["start and end"]
        if self.write is not None:
            whole = self.write.of_tokens("", len(self.lengths), code.machines, chip)
            found[WRITE] = whole.us - whole.terms["launches"]
        return found


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled program: its launches, and the machine code of its kernels by name; those of Pallas are named after
    their terms."""

    launches: Sequence[Launch]
    machines: Mapping[str, Machine]


def product_us(launch: Launch, chip: Chip) -> float:
    """Microseconds of a product of matrices at its bound, and until its first bytes are there."""
    flops = launch.flops / (chip.tensor_flops * chip.num_cores * chip.clock_hz) * 1e6
    return max(memory_us(launch, chip), flops) + chip.us(chip.dram_latency)


def memory_us(launch: Launch, chip: Chip) -> float:
    """Microseconds of a launch's bytes: what an earlier launch has just written comes from the L2."""
    of_memory = launch.argument_bytes / (chip.copy_bytes_per_s * chip.streaming)
    return max(of_memory, (launch.argument_bytes + launch.passed_bytes) / chip.l2_bytes_per_s) * 1e6


def own_us(launch: Launch, machine: Machine | None, chip: Chip) -> float:
    """Microseconds of a kernel of XLA's own, as long as its bytes or its instructions; of a copy, of its bytes."""
    if machine is None:
        return memory_us(launch, chip) + chip.us(chip.l2_latency)
    blocks = min(machine.resident, -(-launch.grid // chip.num_cores))
    of_turn = sum(pipes.width(i) for i in machine.parts.turn if i.name == "LDG")
    read = launch.argument_bytes + launch.passed_bytes - num_bytes(launch.type)
    turns = max(read / (of_turn * launch.grid * launch.threads), 1) if of_turn else 1
    cycles = sum(machine.once(part, chip, blocks, chip.l2_latency) for part in ("before", "after"))
    cycles += turns * machine.once("turn", chip, blocks, chip.l2_latency)
    return max(memory_us(launch, chip), chip.us(cycles * -(-launch.grid // (blocks * chip.num_cores))))


def _kind(launch: Launch) -> str:
    for scope, name in _SCOPES.items():
        if f"/{scope}/" in f"/{launch.scope}":
            return name
    raise ValueError(f"no model of the kernel of {launch.scope}")


def read_code(folder: Path, hlo: str, thunks: str, arch: str, ptxas: str, nvdisasm: str) -> Code:
    """Returns the launches and the machine code of a program that was compiled with dumps to a folder.

    Raises:
      ValueError: a kernel has left no PTX, or cannot be read.
    """
    launches = read_launches(hlo, thunks)
    machines: dict[str, Machine] = {}
    threads = {launch.kernel: launch.threads for launch in launches if launch.kernel and not launch.product}
    for path in sorted(folder.glob("*.ptx")):
        name = _entry(path)
        if name in threads:
            machines[name] = _machine(path, arch, ptxas, nvdisasm, threads[name])
    if missing := threads.keys() - machines:
        raise ValueError(f"no PTX of {', '.join(sorted(missing))}")
    # Mosaic GPU numbers what it dumps in the order in which it meets kernels; some share a name.
    dumped = sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rsplit("_", 1)[-1]))
    met = {launch.pallas: _kind(launch) for launch in launches if launch.pallas}
    if len(dumped) != len(met):
        raise ValueError(f"{len(dumped)} dumps of {len(met)} Mosaic GPU kernels")
    for path, name in zip(dumped, met.values()):
        machines[name] = _machine(path.with_suffix(".ptx"), arch, ptxas, nvdisasm)
    return Code(launches, machines)


def _entry(ptx: Path) -> str:
    text = ptx.read_text()
    begin = text.find(".entry ") + len(".entry ")
    return text[begin : text.find("(", begin)].strip()


def _machine(ptx: Path, arch: str, ptxas: str, nvdisasm: str, threads: int = 0) -> Machine:
    """threads: of a block of a kernel of XLA's own; those of Mosaic GPU are in the log of its passes."""
    cubin = ptx.with_suffix(".cubin")
    done = subprocess.run([ptxas, "-v", f"-arch={arch}", str(ptx), "-o", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ptxas: {' '.join(done.stderr.split())[:300]}")
    [numbers] = compiled.read_ptxas(done.stderr).values()
    [function] = sass.disassemble(cubin, nvdisasm).values()
    shared = numbers["shared_bytes"]
    if threads:
        found = parts.find_parts(function, parts.working)
    else:
        found = parts.find_parts(function)
        launch = compiled.read_mosaic_launch(ptx.with_suffix(".mlir-passes.log").read_text().splitlines())
        assert launch is not None
        threads, shared = launch["threads"], shared + launch["shared_bytes"]
    copies = any(i.name == "USETMAXREG" for i in function.code)  # one warpgroup copies for the others
    resident = H200.resident(numbers["registers"], threads, shared)
    return Machine(found, resident, max(threads // 128 - copies, 1))


def examine(code: Code, model: Program, chip: Chip) -> dict[str, Any]:
    """Returns what rows say of a whole program: "predictions", "launches", and the model's "host_us" and "aim_ms"."""
    found = model.predict(code, chip).plain()
    return {
        "predicted_share": found["share"],
        "predicted_tflops": None,
        "limit": found["limit"],
        "predictions": [found],
        "launches": len(code.launches),
        "host_us": model.host_us,
        "aim_ms": model.aim_ms,
    }


def totals(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Adds up programs that follow each other, of one shape, such as a step and the choice of its tokens.

    Args:
      cases: a row of each program.

    Returns:
      of each shape that has all of its programs: its terms in microseconds, "ms", the launches of both, "host_us", and
      "aim_ms". One step ahead, the host prepares a step while the device computes the one before it: a step takes as
      long as the longer of the two.
    """
    found: dict[str, dict[str, Any]] = {}
    for case in (case for case in cases if case.get("launches")):
        [said] = case["predictions"]
        whole = found.setdefault(said["shape"], {"shape": said["shape"], "terms": {}, "programs": 0, "launches": 0})
        whole["programs"] += 1
        whole["launches"] += case["launches"]
        whole["terms"] = dict(Counter(whole["terms"]) + Counter(said["terms"]))
        if case["aim_ms"] is not None:
            whole |= {key: case[key] for key in ("aim_ms", "host_us", "launches_per_layer")}
    whole = [step for step in found.values() if step.pop("programs") > 1]
    for step in whole:
        step["terms"] = {name: round(us, 1) for name, us in step["terms"].items()}
        step["ms"] = round(max(sum(step["terms"].values()), step["host_us"]) / 1e3, 3)
    return whole
