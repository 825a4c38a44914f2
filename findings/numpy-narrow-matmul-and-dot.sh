#!/usr/bin/env bash
# NumPy 2.4.6 with ml_dtypes 0.6.0: a @ b and np.dot(a, b) of the same int4 vectors are 99 and 3.
#
# Guess: for vectors, @ and np.dot are one operation, as they are for every type of NumPy's own.
# Seen: @ finds no loop for the type and takes that of a wider one: int8 for int4, float32 for bfloat16. np.dot uses the
# type's own function and returns its type: int4 wraps at 7, bfloat16 is rounded to 8 bits.
# A Python float is no weak type either: bfloat16 times 2 stays bfloat16, times 2.0 becomes float32.
# Hurt: whoever writes the reference of a quantised product with one of the two and replaces it by the other: the result
# changes by more than rounding, and for int8 and float16 nothing does.
# Versions: Python 3.11, NumPy 2.4.6, ml_dtypes 0.6.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" - <<'END'
import ml_dtypes
import numpy as np

print(f"NumPy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")
seen = {}
for dtype, values in (
    (ml_dtypes.int4, [7, 7, 1]),
    (np.int8, [7, 7, 1]),
    (ml_dtypes.bfloat16, [1] * 1001),
    (np.float16, [1] * 1001),
):
    vector = np.array(values, dtype)
    by_matmul, by_dot = vector @ vector, np.dot(vector, vector)
    types = type(by_matmul).__name__, type(by_dot).__name__
    seen[vector.dtype.name] = float(by_matmul), float(by_dot), *types
    print(f"{vector.dtype.name:9} a @ b: {float(by_matmul):g} in {types[0]}, np.dot(a, b): {float(by_dot):g} in {types[1]}")
three = np.array([3], ml_dtypes.bfloat16)
print(f"bfloat16 * 2: {(three * 2).dtype}, * 2.0: {(three * 2.0).dtype}")
assert seen == {
    "int4": (99, 3, "int8", "int4"),
    "int8": (99, 99, "int8", "int8"),
    "bfloat16": (1001, 1000, "float32", "bfloat16"),
    "float16": (1001, 1001, "float16", "float16"),
}, "the behaviour has changed"
assert ((three * 2).dtype, (three * 2.0).dtype) == (ml_dtypes.bfloat16, np.float32), "the behaviour has changed"
END
