"""Parts of the emulated machine, in kernels of a few lines: arithmetic, memory, barriers, copies, order."""

import functools

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import TensorMap, Trap
from tests.emulator.memory import swizzled
from tests.emulator.snippets import on_each, run

NUMBERS = np.array([0, 1, 2, 3, 7, 31, 32, 2**31 - 1, 2**31, 2**32 - 1, *range(100, 122)], np.uint32)
REALS = np.concatenate([np.linspace(-3, 3, 28), [np.nan, np.inf, -np.inf, 0]]).astype(np.float32)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.s32 %r2, %r1, -5;", lambda x: x - np.uint32(5)),
        ("shl.b32 %r2, %r1, 40;", lambda x: 0 * x),
        ("shr.s32 %r2, %r1, 40;", lambda x: np.where(x >> 31, 2**32 - 1, 0)),
        ("shr.u32 %r2, %r1, 3;", lambda x: x >> 3),
        ("rem.s32 %r2, %r1, 7;", lambda x: np.fmod(x.view(np.int32), 7)),
        ("div.s32 %r2, %r1, 7;", lambda x: np.trunc(x.view(np.int32) / 7).astype(np.int64)),
        ("mul.hi.s32 %r2, %r1, 1431655766;", lambda x: x.view(np.int32).astype(np.int64) * 1431655766 >> 32),
        ("bfe.u32 %r2, %r1, 3, 4;", lambda x: x >> 3 & 15),
        ("bfe.s32 %r2, %r1, 3, 4;", lambda x: ((x >> 3 & 15) ^ 8) - np.uint32(8)),
        ("prmt.b32 %r2, %r1, 0, 0x0123;", lambda x: x.byteswap()),
        ("lop3.b32 %r2, %r1, 0xFF, 0x100, (0xf0 & 0xcc) ^ 0xaa;", lambda x: (x & 255) ^ 256),
        ("setp.gt.s32 %p1, %r1, 2; selp.b32 %r2, 5, 9, %p1;", lambda x: np.where(x.view(np.int32) > 2, 5, 9)),
        ("mov.b32 %r2, 1; setp.lt.u32 %p1, %r1, 3; @!%p1 mov.b32 %r2, 2;", lambda x: np.where(x < 3, 1, 2)),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, {%rs2, %rs1};", lambda x: x << 16 | x >> 16),
        ("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", lambda x: x.reshape(-1, 2)[:, ::-1].reshape(-1)),
        ("shfl.sync.idx.b32 %r2, %r1, 6, 31, -1;", lambda x: np.full(32, 32)),
    ],
)
def test_integers(operation, expected):
    want = np.asarray(expected(NUMBERS)).astype(np.int64).astype(np.uint32)
    np.testing.assert_array_equal(on_each(operation, NUMBERS), want)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("fma.rn.f32 %r2, %r1, 0f40000000, 0f3F800000;", lambda x: x * 2 + 1),
        ("max.f32 %r2, %r1, 0f00000000;", lambda x: np.fmax(x, 0)),
        ("max.NaN.f32 %r2, %r1, 0f00000000;", lambda x: np.maximum(x, 0)),
        ("ex2.approx.ftz.f32 %r2, %r1;", np.exp2),
        ("cvt.rn.bf16x2.f32 %r3, %r1, %r1; shl.b32 %r2, %r3, 16;", lambda x: x.astype(ml_dtypes.bfloat16)),
        (
            "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r1; cvt.rn.f16x2.e4m3x2 %r3, %rs1; mov.b32 {%rs2, %rs3}, %r3; "
            "cvt.f32.f16 %r2, %rs2;",
            lambda x: np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn),
        ),
        (
            "cvt.rni.s32.f32 %r3, %r1; cvt.rn.f32.s32 %r2, %r3;",
            lambda x: np.clip(np.nan_to_num(np.rint(x), nan=0.0), -(2**31), 2**31),
        ),
        (
            "setp.ne.f32 %p1, %r1, 0f00000000; selp.f32 %r2, 0f3F800000, 0f00000000, %p1;",
            lambda x: (x != 0) & ~np.isnan(x),
        ),
    ],
)
def test_floating_point_numbers(operation, expected):
    with np.errstate(all="ignore"):
        want = np.asarray(expected(REALS)).astype(np.float32)
    np.testing.assert_array_equal(on_each(operation, REALS, np.float32), want)


def test_what_nobody_has_written_is_nan():
    body = "add.s64 %rd4, %rd1, %rd2; ld.shared.b32 %r1, [__dynamic_shmem__0]; st.global.b32 [%rd4], {};"
    assert np.isnan(run(body.format("%r1"), np.zeros(1), np.zeros(32, np.float32), shared_bytes=16)).all()
    assert np.isnan(run(body.format("%r9"), np.zeros(1), np.zeros(32, np.float32), shared_bytes=16)).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd1+128], %r0;", "write of global memory outside of out: bytes 128 to 132 of 128"),
        ("ld.global.b32 %r1, [%rd0+-4];", "read of global memory outside of x"),
        ("ld.global.b32 %r1, [%rd2+77777777777776];", "where nothing is"),
        ("st.shared.b32 [__dynamic_shmem__0+64], %r0;", "write of shared memory outside of what the kernel has"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd0+4];", "not aligned"),
        ("setp.lt.u32 %p1, %r0, 9; @%p1 bra END; END:", "9 of 32 go to"),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [__dynamic_shmem__0], 0;", "no mbarrier at byte 0"),
    ],
)
def test_what_the_hardware_does_not_define_is_a_trap(body, message):
    with pytest.raises(Trap, match=rf"test, block 0, warp 0, line \d+: .*{message}"):
        run(body, np.zeros(32, np.float32), np.zeros(32, np.float32), shared_bytes=64)


def test_an_instruction_that_is_not_modelled_is_refused():
    with pytest.raises(NotImplementedError, match=r"test, line \d+: vote.sync.any.pred .*: not modelled"):
        run("vote.sync.any.pred %p1, %p2, -1;", np.zeros(1), np.zeros(1))


ONE_BARRIER = """
  setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [__dynamic_shmem__0], {count};
  fence.mbarrier_init.release.cluster; bar.sync 0;
"""


def test_a_barrier_lets_threads_pass_when_all_have_arrived():
    body = (
        ONE_BARRIER.format(count=64)
        + """
      setp.ge.u32 %p2, %r0, 32; @%p2 bra SECOND;
      mbarrier.arrive.shared.b64 %rd5, [__dynamic_shmem__0];
      mbarrier.try_wait.parity.shared.b64 %p3, [__dynamic_shmem__0], 0; bra END;
      SECOND: mbarrier.arrive.shared.b64 %rd5, [__dynamic_shmem__0];
      mbarrier.try_wait.parity.shared.b64 %p3, [__dynamic_shmem__0], 0;
      END: mbarrier.try_wait.parity.shared.b64 %p3, [__dynamic_shmem__0], 1; """
    )
    with pytest.raises(Trap, match=r"deadlock: warp 0, line \d+, waits for parity 1 .*phase 1: 64 of 64 arrivals"):
        run(body, np.zeros(1), np.zeros(1), threads=64, shared_bytes=64)


def test_more_arrivals_than_a_barrier_counts_are_a_trap():
    with pytest.raises(Trap, match="32 threads arrive at the mbarrier at byte 0, which waited for 20 of 20"):
        run(
            ONE_BARRIER.format(count=20) + "mbarrier.arrive.shared.b64 %rd5, [__dynamic_shmem__0];",
            np.zeros(1),
            np.zeros(1),
            shared_bytes=64,
        )


def test_a_barrier_is_used_only_after_all_were_told_of_it():
    body = ONE_BARRIER.format(count=64).replace("bar.sync 0;", "mbarrier.arrive.shared.b64 %rd5, [__dynamic_shmem__0];")
    with pytest.raises(Trap, match=r"no mbarrier at byte 0|byte 0 is used without a barrier since warp 0"):
        run(body, np.zeros(1), np.zeros(1), threads=64, shared_bytes=64)


# Each warp writes one word and reads that of the other.
EXCHANGE = """
  shr.u32 %r1, %r0, 5; mul.wide.u32 %rd5, %r1, 4; mov.b64 %rd6, __dynamic_shmem__0; add.s64 %rd7, %rd6, %rd5;
  xor.b32 %r2, %r1, 1; mul.wide.u32 %rd8, %r2, 4; add.s64 %rd9, %rd6, %rd8; add.s64 %rd10, %rd1, %rd2;
  st.shared.b32 [%rd7], %r1; {there} ld.shared.b32 %r3, [%rd9]; {done} st.shared.b32 [%rd7], %r0; bar.sync 0;
  st.global.b32 [%rd10], %r3;
"""


def exchange(there: str, done: str):
    body = EXCHANGE.format(there=there, done=done)
    return run(body, np.zeros(1), np.zeros(64, np.uint32), threads=64, shared_bytes=64)


def test_warps_that_meet_may_read_and_overwrite_words_of_each_other():
    assert exchange("bar.sync 0;", "bar.sync 0;").tolist() == [1] * 32 + [0] * 32


@pytest.mark.parametrize("there, done", [("", "bar.sync 0;"), ("bar.sync 0;", "")])
def test_words_that_only_luck_hands_over_are_traps(there, done):
    with pytest.raises(
        Trap, match=r"a thread (reads|writes) .*, which warp \d has (read|written): no barrier that this"
    ):
        exchange(there, done)


def test_seeds_give_other_orders_of_warps():
    body = "mov.b32 %r1, 5; st.global.b32 [%rd1], %r0; ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd1], %r0;"
    last = {int(run(body, np.zeros(1), np.zeros(1, np.uint32), threads=128, seed=seed)[0]) for seed in range(30)}
    assert len(last) > 1


LOAD = (
    ONE_BARRIER.format(count=1)
    + """
  @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd5, [__dynamic_shmem__0], {bytes};
  mov.b64 %rd6, test_param_2; mov.b64 %rd7, __dynamic_shmem__0; cvt.u32.u64 %r5, %rd7;
  add.s32 %r6, %r5, {at};
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd6, {{ {x}, {y} }}], [%r5];
"""
)
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [__dynamic_shmem__0], 0;"


def to_array(first: int, num_bytes: int) -> str:
    """Copies shared memory to out, 16 bytes for each thread."""
    steps = [
        f"mul.wide.u32 %rd8, %r0, 16; add.s64 %rd9, %rd7, %rd8; add.s64 %rd10, %rd1, %rd8; "
        f"ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd9+{first + i}]; "
        f"st.global.v4.b32 [%rd10+{i}], {{%r10, %r11, %r12, %r13}};"
        for i in range(0, num_bytes, 512)
    ]
    return " ".join(steps)


def rows(address: int, box=(16, 32), swizzle=128, shape=(20, 40)) -> TensorMap:
    return TensorMap(address, shape, (shape[1], 1), box, 4, swizzle)


@pytest.mark.parametrize("swizzle, width", [(0, 64), (32, 8), (64, 16), (128, 32)])
@pytest.mark.parametrize("at", [1024, 1024 + 128, 1024 + 512])
def test_boxes_are_swizzled_by_absolute_address_and_zero_outside_of_the_array(swizzle, width, at):
    x = np.arange(800, dtype=np.uint32).reshape(20, 40) + 1
    make = functools.partial(rows, box=(16, width), swizzle=swizzle)
    size = 16 * width * 4
    body = LOAD.format(bytes=size, at=at, x=4, y=10) + WAIT + to_array(1024, 8192)
    out = run(body, x, np.zeros(2048, np.uint32), shared_bytes=10240, tensor_map=make)
    expected = np.zeros((16, width), np.uint32)
    expected[:10, : min(36, width)] = x[10:, 4 : 4 + width]
    # Row r of 128 bytes has its 16-byte parts c at c ^ r % 8; of 64 bytes, two rows in 128 bytes, at c ^ r // 2 % 4.
    for row in range(16):
        for part in range(width // 4):
            byte = at + row * width * 4 + part * 16
            line = byte // 128
            moved = {0: 0, 32: line % 2, 64: line % 4, 128: line % 8}[swizzle]
            there = (byte // 128 * 128 + (byte % 128 // 16 ^ moved) * 16 - 1024) // 4
            assert (out[there : there + 4] == expected[row, 4 * part : 4 * part + 4]).all()


def test_swizzles_are_permutations_that_are_their_own_inverse():
    addresses = np.arange(4096)
    for span in (32, 64, 128):
        once = swizzled(addresses, span)
        assert sorted(once) == list(addresses) and (swizzled(once, span) == addresses).all()


@pytest.mark.parametrize(
    ("changes", "rest", "message"),
    [
        (dict(bytes=2048), "", "block 0: ends with a TMA load that no warp has waited for"),
        (dict(bytes=4096), WAIT, "deadlock: .* 2048 bytes missing"),
        (dict(bytes=2048, at=1032), WAIT, "a TMA load: .*no multiple of 128"),
        (
            dict(bytes=2048),
            "ld.shared.b32 %r9, [__dynamic_shmem__0+1024];" + WAIT,
            "which a TMA load writes: no barrier",
        ),
    ],
)
def test_copies_that_nobody_waits_for_or_that_go_astray_are_traps(changes, rest, message):
    body = LOAD.format(**(dict(at=1024, x=0, y=0) | changes)) + rest
    with pytest.raises(Trap, match=message):
        run(body, np.zeros((20, 40), np.uint32), np.zeros(1), shared_bytes=4096, tensor_map=rows)


STORE = """
  mov.b64 %rd6, test_param_2; mov.b64 %rd7, __dynamic_shmem__0; cvt.u32.u64 %r5, %rd7; mov.b32 %r6, 0;
  add.s64 %rd8, %rd7, %rd2; st.shared.b32 [%rd8], %r0; {fence} elect.sync %r7|%p1, -1;
  @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd6, {{%r6, %r6}}], [%r5];
  cp.async.bulk.commit_group; {after} cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize(
    ("fence", "after", "message"),
    [
        ("", "", "a TMA store reads shared memory at byte 0, which a thread wrote without a fence.proxy.async"),
        ("fence.proxy.async.shared::cta;", "st.shared.b32 [%rd8], %r0;", "which a wgmma or TMA copy .* is reading"),
        ("fence.proxy.async.shared::cta;", "ret;", "ends with TMA stores under way"),
    ],
)
def test_stores_see_what_was_fenced_and_hold_it_until_they_are_waited_for(fence, after, message):
    one = functools.partial(rows, box=(1, 32), swizzle=0, shape=(1, 32))
    with pytest.raises(Trap, match=message):
        run(
            STORE.format(fence=fence, after=after),
            np.zeros((1, 32), np.uint32),
            np.zeros(1),
            shared_bytes=128,
            tensor_map=one,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(box=(16, 300)), r"box \(16, 300\)"),
        (dict(box=(16, 64)), "rows of 256 bytes in a box swizzled by 128"),
        (dict(shape=(20, 39)), "strides"),
        (dict(box=(16, 3)), "rows of 12 bytes"),
    ],
)
def test_tensor_maps_that_the_driver_refuses_are_traps(changes, message):
    with pytest.raises(Trap, match=message):
        rows(1 << 40, **changes)
