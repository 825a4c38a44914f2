#!/usr/bin/env bash
# jax 0.10.2 on the CPU: broadcast_one_to_all and process_allgather cut 64-bit numbers of NumPy to 32 bits.
#
# Guess: jax.experimental.multihost_utils hands the value of process 0 to the others as it is, or refuses its type.
# Seen: unless x64 is on, a seed of 12,345,678,901 arrives as -539,222,987, on process 0 too, without a warning; a time in
# seconds arrives as float32, whose steps are 128 s. assert_equal fails for an int64 that is equal everywhere and needs more
# than 32 bits, and for NaN.
# Hurt: whoever agrees on a seed, a request id or a deadline between processes. All agree, on another number; small test
# values are right.
# Versions: Python 3.11, jax and jaxlib 0.10.2, NumPy 2.4.6. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/process.py" <<'END'
import sys
import warnings

import jax
import numpy as np
from jax.experimental import multihost_utils

rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
sent = {"seed": np.int64(12_345_678_901), "time": np.float64(1_795_933_781.5)}
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    got = multihost_utils.broadcast_one_to_all(sent)
    gathered = multihost_utils.process_allgather(sent["seed"])
try:
    multihost_utils.assert_equal(sent["seed"])
    equal = "passes"
except AssertionError:
    equal = "fails"
if rank == 0:
    print(f"jax {jax.__version__}, {jax.process_count()} processes")
    for name in sent:
        print(f"{name}: sent {sent[name]!r}, received {got[name]!r}")
    print(f"process_allgather: {gathered.tolist()}; assert_equal of the same seed {equal}; warnings: {len(heard)}")
assert int(got["seed"]) == -539_222_987 and gathered.tolist() == [-539_222_987] * 2, "the behaviour has changed"
assert float(got["time"]) != sent["time"] and equal == "fails" and not heard, "the behaviour has changed"
END
export JAX_PLATFORMS=cpu
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/python" "$folder/process.py" 1 "$port" 2> "$folder/log" &
"$folder/venv/bin/python" "$folder/process.py" 0 "$port" 2> "$folder/log0" || { tail -3 "$folder/log0" >&2; exit 1; }
wait $! || { tail -3 "$folder/log" >&2; exit 1; }
