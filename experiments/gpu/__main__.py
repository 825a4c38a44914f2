"""python -m experiments.gpu [--out DIR] [--only SECTION,...] [--tiny]

Measures ceilings, checks and times every kernel of `pallas_kernels` next to its peers, then the engine. One Hopper GPU,
jax 0.11 and torch; nothing is downloaded. At most 9 minutes. Writes DIR/results.json after every section, and last
prints the table, which is also DIR/table.txt, and writes DIR/gpu-DEVICE-TIME.json for `experiments.gpu.importing`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from experiments.gpu import bundle, driver, plan
from experiments.gpu.table import table

# All files of a run: some machines return only a few.
FILES = (
    "results.json",
    "records.jsonl",
    "table.txt",
    "log.txt",
    "wrong_tile.npy",
    "step_kernels.txt",
    "step_launches.txt",
    "step_after_optimizations.txt.gz",
    "host_profile.txt",
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; --child, --records, --folder and --careful are the driver's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "runs/gpu"))
    parser.add_argument("--only", default="", help="sections, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on any device: tries every line")
    parser.add_argument("--seconds", type=float, default=plan.TOTAL_S, help="for all sections together")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--shard", default="1/1", help="K/N: every N-th spec of correctness, to run N side by side")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--careful", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        from experiments.gpu.child import run_child

        return run_child(args)
    try:
        names = [name for name in args.only.split(",") if name]
        chosen = [plan.by_name(name) for name in names] or list(plan.SECTIONS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for path in (*(out / name for name in FILES), *out.glob(bundle.NAMED)):
        path.unlink(missing_ok=True)
    options = ["--peer-python", args.peer_python, "--shard", args.shard, *(["--tiny"] if args.tiny else [])]
    # An interrupted run still prints the table of its records.
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    try:
        driver.run_all(chosen, out, total_s=args.seconds, options=options)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    results = driver.load(out / "results.json")
    text = table(results)
    (out / "table.txt").write_text(text + "\n")
    print(f"{text}\n{time.monotonic() - began:.0f} s; all records are in {out}/results.json", flush=True)
    if results["records"]:
        print(
            f"to send in, or for `python -m experiments.gpu.importing`: {bundle.write(results, out)}",
            flush=True,
        )
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
