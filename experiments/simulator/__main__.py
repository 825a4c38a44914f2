"""python -m experiments.simulator [MODEL] [--workload poisson|bursts|sessions] [--paced COST]

Predicts a workload of an engine by costs fitted on another, and prints each figure with its error and limit. Exits with
1 if one is beyond it.
"""

from __future__ import annotations

import argparse
import sys

from experiments.simulator.predicting import check_prediction
from ksana_jax.cli.fields import read_setting
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.simulator.cost import read_cost


def main() -> None:
    parser = argparse.ArgumentParser("python -m experiments.simulator", description=__doc__)
    parser.add_argument("model", nargs="?", default="ksana-tiny", help="model of the real engine")
    parser.add_argument("--workload", choices=["poisson", "bursts", "sessions"], default="poisson")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of measurements")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of steps of many sizes in each round")
    parser.add_argument("--num-requests", type=int, default=120, help="requests of the workload in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--paced",
        help="costs of a device that waits instead of computing: a file of `ksana simulate fit`, or as in YAML: "
        "'{level: affine, step_s: 0.004, token_s: 2e-5}'",
    )
    given = vars(parser.parse_args())
    try:
        if given["paced"] is not None:
            given["paced"] = read_cost(read_setting("paced", given["paced"]))
        right = check_prediction(**given)
    except ConfigError as error:
        parser.error(str(error))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
