"""Peak rates of the device: copying its memory, multiplying matrices, copying to and from the host."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from experiments.gpu.context import Context
from experiments.gpu.peer import PeerError, TorchPeer
from experiments.gpu.timing import Dispatched, Sampler, measured


def run(context: Context) -> None:
    peer = TorchPeer(context)
    peer.start()
    size = 2**20 if context.tiny else 2**32
    width = 128 if context.tiny else 8192
    piece, count = (2**14, 4) if context.tiny else (2 * 2**20, 128)
    context.attempt("copy", lambda: _copy(context, peer, size))
    context.attempt("matmul", lambda: _matmul(context, peer, width))
    context.attempt("pinned copies of jax", lambda: _pinned(context, piece, count))
    rates = context.attempt("pinned copies of torch", lambda: peer.ask("pinned", piece=piece, count=count))
    for way, rate in (rates or {}).items():
        context.value(f"pinned {way}, torch, pieces of {piece >> 20} MB", rate / 1e9, "GB/s")
    peer.close()


def _copy(context: Context, peer: TorchPeer, size: int) -> None:
    """Reads and writes `size` bytes each."""
    source = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))  # XLA would drop a plain copy
    right = bool((copy(source)[: 2**16] == source[: 2**16] ^ 1).all())
    samplers: dict[str, Sampler] = {"XLA": Dispatched(lambda i: copy(source), 4)}
    _with_torch(context, peer, samplers, "copy", size=size)
    times, _, readings = measured(context, samplers)
    for name, t in times.items():
        context.record(
            "time",
            metric="copy",
            case=f"{size >> 20} MB",
            who=name,
            ours=False,
            mode="ceiling",
            right=right if name == "XLA" else None,
            bytes=2 * size,
            **t.fields(),
            **readings,
        )
    fastest = min(times.values(), key=lambda t: t.median)
    context.value("copy bandwidth", 2 * size / fastest.median / 1e12, "TB/s")


def _matmul(context: Context, peer: TorchPeer, width: int) -> None:
    a, b = (jax.random.normal(jax.random.key(i), (width, width), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    samplers: dict[str, Sampler] = {"XLA": Dispatched(lambda i: product(a, b), 10)}
    _with_torch(context, peer, samplers, "matmul", size=width)
    times, _, readings = measured(context, samplers)
    for name, t in times.items():
        context.record(
            "time",
            metric="matmul",
            case=f"bfloat16 {width}^3",
            who=name,
            ours=False,
            mode="ceiling",
            flops=2 * width**3,
            **t.fields(),
            **readings,
        )
    fastest = min(times.values(), key=lambda t: t.median)
    context.value("matmul", 2 * width**3 / fastest.median / 1e12, "TFLOP/s")


def _with_torch(context: Context, peer: TorchPeer, samplers: dict[str, Sampler], kind: str, **arguments) -> None:
    try:
        peer.ask(kind, **arguments)
        samplers["torch"] = lambda: peer.ask("sample", kind=kind)["seconds"]
    except PeerError as error:
        context.failed(f"torch {kind}", error)


def _pinned(context: Context, piece: int, count: int) -> None:
    """Swapping as the engine does it: many pieces, one device_put; and the same bytes as one array."""
    device = jax.devices()[0]
    kinds = {m.kind for m in device.addressable_memories()}
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=k) for k in (None, "pinned_host"))
    if "pinned_host" not in kinds:
        raise NotImplementedError(f"the device has no pinned_host memory, only {', '.join(sorted(kinds))}")
    for pieces, size in ((count, piece), (1, piece * count)):
        on_device = [jax.random.bits(jax.random.key(i), (size // 4,), jnp.uint32) for i in range(pieces)]
        on_host = jax.device_put(on_device, there)
        for way, arrays, target in (("to_host", on_device, there), ("to_device", on_host, here)):
            rates = []
            for _ in range(4):
                jax.block_until_ready(arrays)
                started = time.perf_counter()
                jax.block_until_ready(jax.device_put(arrays, target))
                rates.append(pieces * size / (time.perf_counter() - started))
            context.value(f"pinned {way}, jax, {pieces} pieces of {size >> 20} MB", max(rates[1:]) / 1e9, "GB/s")
