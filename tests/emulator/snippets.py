"""Kernels of a few lines of PTX, run without jax or a compiler."""

import numpy as np

from tests.emulator import Global, Kernel

HEAD = """
.visible .entry test(
  .param .u64 .ptr test_param_0, .param .u64 .ptr test_param_1, .param .align 64 .b8 test_param_2[128]
)
.maxntid {threads}, 1, 1
{{
  .reg .pred %p<20>; .reg .b16 %rs<40>; .reg .b32 %r<200>; .reg .b64 %rd<60>;
  ld.param.b64 %rd0, [test_param_0];
  ld.param.b64 %rd1, [test_param_1];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd2, %r0, 4;
"""


def run(body: str, x, out, *, threads: int = 32, shared_bytes: int = 0, tensor_map=None, seed: int = 0):
    """Runs a body with %rd0 the address of x, %rd1 that of out, %r0 the thread and %rd2 four times it; gives out.

    Args:
      tensor_map: of the address of x; at test_param_2.
    """
    memory, out = Global(), np.array(out)
    text = HEAD.format(threads=threads) + body + "\n ret;\n}\n"
    kernel = Kernel(text, grid=(1, 1, 1), threads=(threads, 1, 1), shared_bytes=shared_bytes)
    given = np.array(x)
    addresses = [memory.add(given, "x"), memory.add(out, "out")]
    maps = {} if tensor_map is None else {(2, 0): tensor_map(addresses[0])}
    kernel.run(memory, [*addresses, 0], tensor_maps=maps, seed=seed)
    return out


def on_each(operations: str, x, dtype: type = np.uint32):
    """Applies operations, from %r1 to %r2, to 32 numbers of 32 bits."""
    body = f"add.s64 %rd3, %rd0, %rd2; add.s64 %rd4, %rd1, %rd2; ld.global.b32 %r1, [%rd3]; {operations} "
    return run(body + "st.global.b32 [%rd4], %r2;", x, np.zeros(32, dtype))
