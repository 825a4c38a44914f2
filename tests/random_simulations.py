"""Random simulations of an engine: requests, steps and trouble in any order, see `tests.simulation`.

python -m tests.random_simulations --seed 7                       replays one
python -m tests.random_simulations --examples 100000 --workers 2  looks for one that ends badly
"""

from __future__ import annotations

import argparse
import collections
import functools
import multiprocessing
import random
import time

from tests.drawn_eviction import METHODS
from tests.evicting_codes_simulation import EvictingCodesSimulation
from tests.latent_simulation import LatentSelectingSimulation, LatentSimulation
from tests.sealing_simulation import SealingSimulation
from tests.selecting_simulation import SelectingSimulation
from tests.simulation import Simulation
from tests.simulation_settings import TRIPLES, triples
from tests.speculating_simulation import (
    DraftModelSelectingSimulation,
    DraftModelSimulation,
    DraftModelStoringSimulation,
    SpeculatingSelectingSimulation,
    SpeculatingSimulation,
    SpeculatingStoringSimulation,
)
from tests.state_simulation import DraftModelStateSimulation, SpeculatingStateSimulation, StateSimulation
from tests.storing_simulation import DRAWN, StoringSimulation

# What a thousand simulations must meet besides.
MET = {f"engines with {name}" for name in (*METHODS, *DRAWN, "whole", "once", "streamed", "pyramid")}
MET |= {"evicted", "swapped_in", "preemptions", "changes of budget", "changes refused", "failed steps"}


def kind_of(seed: int) -> type[Simulation]:
    """Of six simulations, one has an engine that evicts tokens or stores codes, one a block codec, every third of these
    with evictions, and one selects blocks, the first and the last in turn with latents; one of seven speculates, and
    another one does so with a draft model; one of nine has recurrent layers, and two of three of these speculate.
    """
    if seed % 7 == 2:
        return (DraftModelSimulation, DraftModelStoringSimulation, DraftModelSelectingSimulation)[seed % 3]
    if seed % 7 == 1:
        return (SpeculatingSimulation, SpeculatingStoringSimulation, SpeculatingSelectingSimulation)[seed % 3]
    if seed % 9 == 4:
        return (StateSimulation, SpeculatingStateSimulation, DraftModelStateSimulation)[seed // 9 % 3]
    storing, selecting = StoringSimulation, SelectingSimulation
    sealing = EvictingCodesSimulation if seed // 6 % 3 == 2 else SealingSimulation
    if seed // 6 % 2:
        storing, selecting = LatentSimulation, LatentSelectingSimulation
    return (storing, Simulation, Simulation, sealing, Simulation, selecting)[seed % 6]


def simulate(rng: random.Random, num_steps: int = 50, kind: type[Simulation] = Simulation) -> Simulation:
    """Requests, steps and trouble in any order, until so many steps are done; then to the end."""
    simulation = kind(rng)
    for _ in range(8 * num_steps):
        if simulation.num_steps >= num_steps:
            break
        simulation.meanwhile()
        kind = rng.randint(0, 99)
        if kind < 55:
            for _ in range(rng.randint(1, 6)):
                simulation.step()
        elif kind < 77:
            simulation.add()
        elif kind < 82:
            simulation.add_beams()
        elif kind < 88:
            simulation.next_turn()
        elif kind < 92:
            simulation.abort()
        elif kind < 95:
            simulation.disk_trouble()
        elif kind < 96:
            simulation.failing_step()
        elif kind < 98:
            simulation.change_pattern()
        else:
            simulation.restart()
    simulation.finish()
    return simulation


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.random_simulations")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    if given.seed is not None:
        simulation = simulate(random.Random(given.seed), given.steps, kind_of(given.seed))
        print(f"{simulation.num_steps} steps, and all is well")
        return
    began, seeds = time.perf_counter(), range(given.first, given.first + given.examples)
    with multiprocessing.Pool(given.workers) as pool:
        results = pool.imap_unordered(functools.partial(_simulated, given.steps), seeds, 16)
        seen: collections.Counter[str] = collections.Counter()
        steps = failed = 0
        met: set[tuple[str, ...]] = set()
        for seed, count, events, drawn, error in results:
            steps += count
            met |= triples(drawn)
            seen.update(events)
            if error:
                failed += 1
                print(f"seed {seed}: {error}", flush=True)
    seconds = time.perf_counter() - began
    print(", ".join(f"{count:,} {name}" for name, count in seen.items()))
    print(f"{given.examples:,} simulations, {failed} failed; {steps:,} steps, {steps / seconds:,.0f} a second")
    met &= TRIPLES
    missed = ", ".join(map(" + ".join, sorted(TRIPLES - met)[:9]))
    print(f"{len(met)} of {len(TRIPLES)} threes of settings met" + f", not {missed}" * bool(missed))
    unmet = sorted(MET - (+seen).keys())
    print(
        f"{len(MET) - len(unmet)} of {len(MET)} methods, codecs and events met"
        + f", not {', '.join(unmet)}" * bool(unmet)
    )
    few = given.examples >= 1000 and (len(met) < 0.99 * len(TRIPLES) or unmet)
    raise SystemExit(bool(failed or few))


def _simulated(num_steps: int, seed: int) -> tuple[int, int, dict[str, int], set[str], str]:
    try:
        simulation = simulate(random.Random(seed), num_steps, kind_of(seed))
        return seed, simulation.num_steps, dict(simulation.seen), simulation.drawn(), ""
    except Exception as error:
        return seed, 0, {}, set(), f"{type(error).__name__}: {str(error)[:200]}"


if __name__ == "__main__":
    _main()
