"""Attention as torch and its neighbours do it: the peers of ours, by kind, for one case each. Needs torch.

FlashInfer, FlashAttention 3 and vLLM are used where they can be imported. They are written from their documentation:
where that has moved on, they are reported as failed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from pallas_kernels.mask import FAR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass
class TorchCase:
    """See `cases.Case`; `sets` is how many copies of keys and values calls rotate through."""

    lengths: list[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    prefill: bool
    sets: int
    window: int
    sinks: int
    tiny: bool

    @property
    def full(self) -> bool:
        return self.window >= FAR

    def dense(self) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """q [R, N, Q, H], unscaled, and keys and values [R, K, T, H] for each set.

        Raises:
          NotImplementedError: the rows differ in length.
        """
        if len(set(self.lengths)) > 1:
            raise NotImplementedError("a dense copy of a ragged batch is padded to the longest row: no bound")
        rows, length = len(self.lengths), self.lengths[0]
        q = torch.randn(rows, self.num_heads, length if self.prefill else 1, self.head_dim, **LIKE)
        kv = [
            tuple(torch.randn(rows, self.num_kv_heads, length, self.head_dim, **LIKE) for _ in range(2))
            for _ in range(self.sets)
        ]
        return q, kv  # pyright: ignore[reportReturnType]

    def paged(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """q [R, N, H]; [M, 2, B, K, H] for each set; tables [R, P] and lengths [R], int32."""
        rows, size = len(self.lengths), self.block_size
        counts = [-(-n // size) for n in self.lengths]
        order, used = torch.randperm(sum(counts), device=DEVICE).to(torch.int32), 0
        tables = torch.zeros(rows, max(counts), dtype=torch.int32, device=DEVICE)
        for row, count in enumerate(counts):
            tables[row, :count] = order[used : used + count]
            used += count
        shape = (sum(counts), 2, size, self.num_kv_heads, self.head_dim)
        pools = [torch.randn(shape, **LIKE) for _ in range(self.sets)]
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return torch.randn(rows, self.num_heads, self.head_dim, **LIKE), pools, tables, lengths


LIKE: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}


def relative_error(out: torch.Tensor, right: torch.Tensor) -> float:
    """||out - right|| / ||right||; inf where out is not finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out.double() - right.double()).norm() / right.double().norm())


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Float32 attention of q [N, Q, H] to k, v [K, T, H]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.float() @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


class Dense:
    """Keys and values [R, K, T, H] without blocks."""

    def __init__(self, case: TorchCase):
        self.case = case
        self.q, self.kv = case.dense()

    def attend(self, q, k, v) -> torch.Tensor:
        raise NotImplementedError

    def call(self, index: int) -> torch.Tensor:
        return self.attend(self.q, *self.kv[index % len(self.kv)])

    def relative_error(self) -> float:
        """Relative error over the last 64 queries of the first and the last row."""
        case, length = self.case, self.case.lengths[0]
        out, (k, v) = self.call(0), self.kv[0]
        last = min(64, self.q.shape[2])
        q_pos = torch.arange(length - last, length, device=DEVICE)[:, None]
        kv_pos = torch.arange(length, device=DEVICE)[None]
        mask = (kv_pos <= q_pos) & ((q_pos - kv_pos < case.window) | (kv_pos < case.sinks))
        rows = sorted({0, len(case.lengths) - 1})
        right = torch.stack([_exact(self.q[r, :, -last:], k[r], v[r], mask) for r in rows])
        return relative_error(out[rows][:, :, -last:], right)


class Sdpa(Dense):
    """torch.nn.functional.scaled_dot_product_attention with one of its back ends."""

    def __init__(self, case: TorchCase, backend: str):
        from torch.nn.attention import SDPBackend

        if not case.full:
            raise NotImplementedError("a window would need a dense mask")
        self.backend = getattr(SDPBackend, backend if DEVICE == "cuda" else "MATH")
        super().__init__(case)

    def attend(self, q, k, v):
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.case.prefill, enable_gqa=True)


class Flex(Dense):
    """FlexAttention, compiled; its block mask skips what a window hides."""

    def __init__(self, case: TorchCase):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        super().__init__(case)
        length, offset = case.lengths[0], 0 if case.prefill else case.lengths[0] - 1
        self.mask = None
        if case.prefill or not case.full:

            def seen(b, h, q, kv):
                distance = q + offset - kv
                return (distance >= 0) & ((distance < case.window) | (kv < case.sinks))

            self.mask = create_block_mask(seen, None, None, self.q.shape[2], length, device=DEVICE)
        # Compiling needs a C++ compiler on a processor; there the uncompiled function shows that the call is right.
        self.attention = torch.compile(flex_attention, dynamic=False) if DEVICE == "cuda" else flex_attention

    def attend(self, q, k, v):
        return self.attention(q, k, v, block_mask=self.mask, enable_gqa=True)


class Paged:
    """Blocks in a pool; decode only."""

    def __init__(self, case: TorchCase):
        if case.prefill:
            raise NotImplementedError("prefill over blocks is not written for this peer")
        self.case = case
        self.q, self.pools, self.tables, self.lengths = case.paged()

    def attend(self, pool: torch.Tensor) -> torch.Tensor:
        """[R, N, H] from a pool [M, 2, B, K, H]."""
        raise NotImplementedError

    def call(self, index: int) -> torch.Tensor:
        return self.attend(self.pools[index % len(self.pools)])

    def relative_error(self) -> float:
        """Relative error over the first and the last row."""
        case, out, pool = self.case, self.call(0), self.pools[0]
        rows, right = sorted({0, len(case.lengths) - 1}), []
        for row in rows:
            length = case.lengths[row]
            blocks = pool[self.tables[row, : -(-length // case.block_size)].long()]
            k, v = blocks.transpose(0, 1).reshape(2, -1, case.num_kv_heads, case.head_dim)[:, :length].transpose(1, 2)
            kv_pos = torch.arange(length, device=DEVICE)
            mask = (length - 1 - kv_pos < case.window) | (kv_pos < case.sinks)
            right.append(_exact(self.q[row][:, None], k, v, mask)[:, 0])
        return relative_error(out[rows], torch.stack(right))


class FlashInfer(Paged):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper, layout NHD."""

    def __init__(self, case: TorchCase):
        import flashinfer

        super().__init__(case)
        if not case.full:
            raise NotImplementedError("a window with sinks is not written for FlashInfer")
        counts = (self.lengths + case.block_size - 1) // case.block_size
        begin = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        ids = torch.cat([t[:n] for t, n in zip(self.tables, counts.tolist())])
        space = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        self.wrapper.plan(
            begin,
            ids,
            self.lengths - (counts - 1) * case.block_size,
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            case.block_size,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def attend(self, pool):
        return self.wrapper.run(self.q, pool)


class FlashAttention3(Paged):
    """flash_attn_interface.flash_attn_with_kvcache of FlashAttention 3, with a page table."""

    def __init__(self, case: TorchCase):
        from flash_attn_interface import flash_attn_with_kvcache

        super().__init__(case)
        if not case.full and case.sinks:
            raise NotImplementedError("a window with sinks is not written for FlashAttention 3")
        self.attention = flash_attn_with_kvcache

    def attend(self, pool):
        window = (-1, -1) if self.case.full else (self.case.window - 1, 0)
        out = self.attention(
            self.q[:, None],
            pool[:, 0],
            pool[:, 1],
            cache_seqlens=self.lengths,
            page_table=self.tables,
            causal=True,
            window_size=window,
        )
        return (out[0] if isinstance(out, tuple) else out)[:, 0]


class Vllm(Paged):
    """vLLM's Triton kernel, unified_attention."""

    def __init__(self, case: TorchCase):
        from vllm.v1.attention.ops.triton_unified_attention import (
            unified_attention,
        )

        super().__init__(case)
        if not case.full and case.sinks:
            raise NotImplementedError("a window with sinks is not written for vLLM")
        self.attention, self.out = unified_attention, torch.empty_like(self.q)
        self.starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=DEVICE)

    def attend(self, pool):
        case = self.case
        self.attention(
            q=self.q,
            k=pool[:, 0],
            v=pool[:, 1],
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=1,
            seqused_k=self.lengths,
            max_seqlen_k=max(case.lengths),
            softmax_scale=case.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1) if case.full else (case.window - 1, 0),
            block_table=self.tables,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return self.out


KINDS = {
    "torch SDPA flash (dense)": lambda case: Sdpa(case, "FLASH_ATTENTION"),
    "torch SDPA cuDNN (dense)": lambda case: Sdpa(case, "CUDNN_ATTENTION"),
    "torch FlexAttention (dense)": Flex,
    "FlashInfer": FlashInfer,
    "FlashAttention 3": FlashAttention3,
    "vLLM Triton": Vllm,
}
