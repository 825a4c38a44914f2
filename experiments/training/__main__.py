"""Trains a model, or resumes an interrupted run: python -m experiments.training FILE [KEY=VALUE ...]"""

from __future__ import annotations

import argparse
import logging
import sys

from experiments.training import train


def main(argv: list[str] | None = None) -> int:
    """The command. Invalid input gives one line on stderr and exit status 2; Ctrl-C 130."""
    parser = argparse.ArgumentParser("python -m experiments.training", description="Trains a model, or resumes a run.")
    parser.add_argument("file", help="a YAML file, such as configs/train/ksana_tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as model.d_model=128")
    args = parser.parse_args(argv)
    # Losses and checkpoints are the only output of hours of training.
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("experiments").setLevel(logging.INFO)
    try:
        train(args.file, args.overrides)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; repeat the command to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
