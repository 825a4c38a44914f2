"""Predicts whole programs, such as a step of a model: each of their launches, and the gaps between them.

Kernels of Pallas take the times of `predict`, `grids` and `products`, XLA's own small kernels the time of their machine
code, XLA's products of matrices their bytes or their operations: XLA chooses kernels for these on a
GPU, by timing them.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.aot import report as compiled
from pallas_kernels.speed import parts, pipes, sass
from pallas_kernels.speed.chip import H200, Chip
from pallas_kernels.speed.grids import Mass, Tokens
from pallas_kernels.speed.launches import Launch, num_bytes, read_launches
from pallas_kernels.speed.predict import Attention, Machine, Prediction, sum_of
from pallas_kernels.speed.products import Ahead, Product

# Terms of a step, the first of which are kernels of Pallas. Shared: over blocks that rows have in common.
ATTENTION, MERGE, WRITE, MASS = "attention", "merge", "write", "mass"
SHARED_ATTENTION, SHARED_MERGE = "shared attention", "shared merge"
PRODUCTS, SMALL, WORK_LIST, GAPS = "products", "small kernels of layers", "work list", "gaps"
# Products of few rows in a kernel of ours, of the term PRODUCTS.
OWN_PRODUCTS = {f"product {name}": f"{name}/hopper_product" for name in ("qkv", "output", "gate_up", "down")}
# The product with the vocabulary, and the choice of tokens by it. Embedding, angles of the rope, last norm.
LM_HEAD, CHOICE, ONCE = "LM head", "choice of tokens", "others of a step"
# Terms of kernels, by a part of their scope.
_SCOPES = {
    "shared/hopper_attention": SHARED_ATTENTION,
    "shared/hopper_merge": SHARED_MERGE,
    "hopper_attention": ATTENTION,
    "hopper_merge": MERGE,
    "kv_write": WRITE,
    "hopper_mass": MASS,
} | {scope: name for name, scope in OWN_PRODUCTS.items()}


class Rows(NamedTuple):
    """Rows of one query each in a step. lengths: visible tokens of each, without its shared ones.
    shared: visible tokens that each group of rows shares."""

    lengths: tuple[int, ...]
    shared: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """How a whole program is predicted.

    Args:
      shapes: by their names; the program is compiled for all of them.
      attention, write, shared, mass: models of its kernels, named after their terms; None where it has none.
      products: models of products, by their names in OWN_PRODUCTS.
      host_us: the host's time for a step, in microseconds, measured. aim_ms: for the first shape, of a whole step.
    """

    shapes: Mapping[str, Rows]
    attention: Attention | None = None
    write: Tokens | None = None
    shared: Attention | None = None
    mass: Mass | None = None
    products: Mapping[str, Product] = dataclasses.field(default_factory=dict)
    host_us: float = 0.0
    aim_ms: float | None = None

    def predict(self, code: Code, chip: Chip) -> list[Prediction]:
        """Predicts each shape; terms are in microseconds, and all of them are added."""
        return [self._of_shape(name, rows, code, chip) for name, rows in self.shapes.items()]

    def _of_shape(self, shape: str, rows: Rows, code: Code, chip: Chip) -> Prediction:
        terms: dict[str, float] = defaultdict(float)
        num_bytes, of_pallas, ahead = 0.0, self._of_pallas(rows, code, chip), Ahead(chip)
        for launch, name in zip(code.launches, code.terms):
            ahead.start()
            if name in OWN_PRODUCTS:
                model, machine = self.products[name], code.machines[name]
                cached = ahead.take(model.start_us(machine, chip))
                us = _without_gaps(model.of_machine(machine, chip, cached).terms)
                num_bytes += model.weight_bytes
                ahead.ask(model.ahead_bytes, model.end_us(machine, chip))
            elif launch.pallas:
                us, read = of_pallas[name]
                num_bytes += read
                ahead.run(us, read)
            elif launch.product:
                # No product asks for weights of the head.
                cached = 0.0 if name == LM_HEAD else ahead.take(chip.us(chip.dram_latency))
                us = product_us(launch, chip, cached)
                num_bytes += launch.argument_bytes
            else:
                us = own_us(launch, code.machines.get(launch.kernel), chip)
                ahead.run(us, launch.argument_bytes)
            terms[PRODUCTS if name in OWN_PRODUCTS else name] += us
        terms[GAPS] = chip.launch_us * len(code.launches)
        us = sum(terms.values())
        share = num_bytes / (us * 1e-6) / chip.copy_bytes_per_s
        return Prediction(shape, us, max(terms, key=lambda name: terms[name]), dict(terms), share)

    def _of_pallas(self, rows: Rows, code: Code, chip: Chip) -> dict[str, tuple[float, float]]:
        """Microseconds of a launch of each kernel of Pallas, without the gap before it, and bytes of the pool."""
        found = {}
        attentions = (self.attention, rows.lengths, ATTENTION, MERGE), (
            self.shared, rows.shared, SHARED_ATTENTION, SHARED_MERGE
        )  # fmt: skip
        for model, lengths, name, merge in attentions:
            if model is not None:
                terms = model.of_shape("", lengths, code.machines, chip).terms
                found[merge] = terms["merge"], 0.0
                found[name] = _without_gaps(terms, merge=0.0), model.num_bytes(lengths)
        if self.write is not None:
            terms = self.write.of_tokens("", len(rows.lengths), code.machines, chip).terms
            found[WRITE] = _without_gaps(terms), 0.0
        if self.mass is not None:
            terms = self.mass.of_shape("", rows.lengths, code.machines, chip).terms
            found[MASS] = _without_gaps(terms), self.mass.num_bytes(rows.lengths)
        return found


def _without_gaps(terms: Mapping[str, float], **changed: float) -> float:
    return sum_of({**terms, "launches": 0.0, **changed})


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled program: its launches, and the machine code of its kernels by name.

    Kernels of Pallas are named after their terms.
    """

    launches: Sequence[Launch]
    machines: Mapping[str, Machine]

    @functools.cached_property
    def num_layers(self) -> int:
        """Number of runs of Pallas' kernels."""
        return max(Counter(launch.pallas for launch in self.launches if launch.pallas).values(), default=1)

    @functools.cached_property
    def terms(self) -> list[str]:
        """The term of each launch."""
        repeated, found = Counter(launch.alike for launch in self.launches), []
        for launch in self.launches:
            if launch.pallas:
                found.append(_kind(launch))
            elif launch.scope.startswith("choice/"):
                found.append(LM_HEAD if launch.product else CHOICE)
            elif launch.product:
                found.append(PRODUCTS)
            elif 4 * repeated[launch.alike] > self.num_layers > 1:  # XLA need not treat all layers alike
                found.append(SMALL)
            else:
                found.append(WORK_LIST if "/attention/" in launch.scope else ONCE)
        return found

    @property
    def launches_per_layer(self) -> float | None:
        """Launches of layers, by their number; None of a program without layers."""
        of_layers = sum(name not in (WORK_LIST, ONCE, LM_HEAD, CHOICE) for name in self.terms)
        return round(of_layers / self.num_layers, 1) if self.num_layers > 1 else None


def product_us(launch: Launch, chip: Chip, cached_bytes: float = 0.0) -> float:
    """Microseconds of a product of matrices at its bound, and until its first bytes arrive.

    Args:
      cached_bytes: bytes of its weights in the L2.
    """
    flops = launch.flops / chip.product_flops * 1e6
    return max(memory_us(launch, chip, cached_bytes), flops) + chip.us(chip.dram_latency)


def memory_us(launch: Launch, chip: Chip, cached_bytes: float = 0.0) -> float:
    """Microseconds of a launch's bytes: bytes that an earlier launch has just written come from the L2, as do cached
    bytes of its arguments."""
    of_memory = (launch.argument_bytes - cached_bytes) / chip.weight_bytes_per_s
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
    # Functions with a separate jit are no scopes.
    scopes = "/".join(part for part in launch.scope.split("/") if "(" not in part)
    for scope, name in _SCOPES.items():
        if f"/{scope}/" in f"/{scopes}":
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
    # Mosaic GPU numbers its dumps in the order in which it meets kernels; some share a name.
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
    """threads: of a block of a kernel of XLA's own; Mosaic GPU's are in the log of its passes."""
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
    """Returns the columns of a whole step: "predictions", "launches" in all and per layer, the model's "host_us" and
    "aim_ms"."""
    found = [prediction.plain() for prediction in model.predict(code, chip)]
    return {
        "predicted_share": found[0]["share"],
        "predicted_tflops": None,
        "limit": found[0]["limit"],
        "predictions": found,
        "launches": len(code.launches),
        "launches_per_layer": code.launches_per_layer,
        "host_us": model.host_us,
        "aim_ms": model.aim_ms,
    }


def whole_steps(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the times of steps: for each shape its terms in microseconds, "ms", "launches", "host_us", and "aim_ms"
    of the first one. One step ahead, the host prepares a step while the device computes the previous one: a step takes
    the longer time of the two.

    Args:
      cases: a row of each program.
    """
    found = []
    for case in (case for case in cases if case.get("launches")):
        for number, said in enumerate(case["predictions"]):
            terms = {name: round(us, 1) for name, us in said["terms"].items()}
            about = {"shape": said["shape"], "terms": terms}
            about |= {name: case[name] for name in ("launches", "launches_per_layer", "host_us")}
            about["aim_ms"] = None if number else case["aim_ms"]
            found.append(about | {"ms": round(max(sum(terms.values()), case["host_us"]) / 1e3, 3)})
    return found
