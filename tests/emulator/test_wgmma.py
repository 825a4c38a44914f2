"""Operands and results of wgmma against NumPy."""

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import Trap, wgmma
from tests.emulator.memory import swizzled

RNG = np.random.default_rng(0)


def descriptor(start: int, leading: int, stride: int, span: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[span] << 62


def placed(matrix: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Shared memory in which the elements of a matrix are at addresses."""
    data = np.zeros(1 << 16, np.uint8)
    data.view(np.uint16)[where // 2] = matrix.view(np.uint16)
    return data


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("start", [0, 4096 + 32])
def test_operands_with_depth_along_rows_lie_in_atoms_of_eight_rows(span, start):
    if start % span + 32 > span:
        pytest.skip("a row of the swizzle ends here")
    matrix = RNG.normal(size=(64, 16)).astype(ml_dtypes.bfloat16)
    row, column = np.indices(matrix.shape)
    where = swizzled(start + row // 8 * 8 * span + row % 8 * span + column * 2, span)
    got = wgmma.addresses(descriptor(start, 0, 8 * span, span), 64, 16, False, 2)
    np.testing.assert_array_equal(wgmma.load(placed(matrix, where), got, ml_dtypes.bfloat16), matrix.astype(np.float32))


@pytest.mark.parametrize("span", [32, 64, 128])
def test_operands_with_depth_along_columns_lie_in_atoms_of_eight_depths(span):
    matrix = RNG.normal(size=(128, 16)).astype(ml_dtypes.bfloat16)  # [columns of B, depth]
    column, depth = np.indices(matrix.shape)
    per, leading, stride = span // 2, 16 * span, 8 * span
    where = swizzled(column // per * leading + depth // 8 * stride + depth % 8 * span + column % per * 2, span)
    got = wgmma.addresses(descriptor(0, leading, stride, span), 128, 16, True, 2)
    np.testing.assert_array_equal(wgmma.load(placed(matrix, where), got, ml_dtypes.bfloat16), matrix.astype(np.float32))


def test_operands_that_reach_beyond_their_swizzle_are_traps():
    with pytest.raises(Trap, match="beyond a swizzle of 32"):
        wgmma.addresses(descriptor(16, 0, 256, 32), 64, 16, False, 2)


def test_registers_hold_what_ptx_says():
    """PTX ISA, "Register fragments for wgmma": thread 5 has rows 1 and 9, columns 2 and 3 of each eight."""
    matrix = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    registers = wgmma.to_accumulators(matrix)
    assert len(registers) == 16
    of_thread = [float(r.view(np.float32)[5]) for r in registers[:6]]
    assert of_thread == [matrix[1, 2], matrix[1, 3], matrix[9, 2], matrix[9, 3], matrix[1, 10], matrix[1, 11]]
    np.testing.assert_array_equal(wgmma.from_accumulators(registers), matrix)

    a = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    fragments = [np.zeros((32, 2), ml_dtypes.bfloat16) for _ in range(4)]
    for lane in range(32):
        for i, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            at = column + lane % 4 * 2
            fragments[i][lane] = a[row + lane // 4, at : at + 2]
    words = [x.view(np.uint32).reshape(32) for x in fragments]
    np.testing.assert_array_equal(wgmma.from_fragments(words, ml_dtypes.bfloat16), a)
