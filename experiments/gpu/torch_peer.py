"""Torch's side: makes a case's arrays, checks a kernel against float32, and times it by events around graph replays.

Reads one JSON object a line from standard input and answers with one; what it cannot do is {"error": why}. Run by
`peer.TorchPeer`; knows no jax. Without a GPU it runs the same calls without graphs.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import torch

from experiments.gpu import torch_kernels

CUDA = torch.cuda.is_available()
SAMPLE_S = 0.02


class Timed:
    """`calls` calls as one graph, replayed; call(i) runs call i."""

    def __init__(self, call, calls: int):
        self._calls = calls
        for i in range(3):
            call(i)
        self.mode = "dispatched"
        self._run = lambda: [call(i) for i in range(calls)]
        if CUDA:
            torch.cuda.synchronize()
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(calls):
                        call(i)
                self._run, self.mode, self._graph = graph.replay, "graph", graph
            except Exception as error:  # still worth its time without a graph
                torch.cuda.synchronize()
                self.mode = f"dispatched (no graph: {type(error).__name__})"
        self._repeats = 1
        self.sample()
        self._repeats = max(1, min(1000, round(SAMPLE_S / max(self.sample() * calls, 1e-9)))) if CUDA else 1

    def sample(self) -> float:
        """Seconds of one call."""
        if not CUDA:
            started = time.perf_counter()
            self._run()
            return (time.perf_counter() - started) / self._calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(self._repeats):
            self._run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / (self._repeats * self._calls)


class TorchServer:
    """Implementations that `peer.TorchPeer` can request."""

    def __init__(self):
        self._timed: dict[str, Timed] = {}

    def versions(self) -> dict[str, Any]:
        found = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        for name in ("transformers", "triton", "flashinfer", "flash_attn_interface", "flash_attn", "vllm"):
            try:
                found[name] = getattr(importlib.import_module(name), "__version__", "present")
            except Exception as error:
                found[name] = f"not importable: {type(error).__name__}"
        if CUDA:
            found["device"] = torch.cuda.get_device_name()
            found["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
        return {"versions": found}

    def prepare(self, kind: str, calls: int, **case: Any) -> dict[str, Any]:
        """Builds a kernel of `torch_kernels.KINDS` for a case and checks it: {"relative_error", "mode"}."""
        kernel = torch_kernels.KINDS[kind](torch_kernels.TorchCase(**case))
        error = kernel.relative_error()
        timed = Timed(kernel.call, calls)
        self._timed[kind] = timed
        return {"relative_error": error, "mode": timed.mode}

    def sample(self, kind: str) -> dict[str, Any]:
        return {"seconds": self._timed[kind].sample()}

    def free(self) -> dict[str, Any]:
        """Forgets all kernels and their arrays."""
        self._timed.clear()
        if CUDA:
            torch.cuda.empty_cache()
        return {}

    def copy(self, size: int) -> dict[str, Any]:
        """Prepares a device copy of `size` bytes, sampled as "copy"."""
        a = torch.randint(0, 1 << 30, (size // 4,), dtype=torch.int32, device=torch_kernels.DEVICE)
        b = torch.empty_like(a)
        self._timed["copy"] = Timed(lambda i: b.copy_(a), 4)
        return {}

    def matmul(self, size: int) -> dict[str, Any]:
        """Prepares a bfloat16 product of square matrices, sampled as "matmul"."""
        a, b = (torch.randn(size, size, device=torch_kernels.DEVICE, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        self._timed["matmul"] = Timed(lambda i: torch.matmul(a, b, out=out), 10)
        return {}

    def pinned(self, piece: int, count: int) -> dict[str, Any]:
        """Bytes a second between pinned host memory and the device, in pieces: {"to_device", "to_host"}."""
        if not CUDA:
            raise NotImplementedError("pinned copies need a GPU")
        host = torch.empty(count, piece, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(count, piece, dtype=torch.uint8, device="cuda")
        rates = {}
        for name, to, source in (("to_device", device, host), ("to_host", host, device)):
            for _ in range(2):  # the first warms up
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record()
                for i in range(count):
                    to[i].copy_(source[i], non_blocking=True)
                end.record()
                torch.cuda.synchronize()
                rates[name] = piece * count / (start.elapsed_time(end) * 1e-3)
        return rates


def main() -> None:
    # Answers go to the real standard output; what libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.manual_seed(0)
    server = TorchServer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            with torch.inference_mode():
                answer = getattr(server, request.pop("op"))(**request)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            lacks = isinstance(error, (ImportError, NotImplementedError))
            answer = {"error": f"{type(error).__name__}: {lines[0][:300]}", "lacks": lacks}
            answer["absent"] = isinstance(error, ImportError)
            if CUDA and "CUDA error" in str(error):
                answer["dead"] = True
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("dead"):
            return  # this CUDA context is lost: the next ask starts another process


if __name__ == "__main__":
    main()
