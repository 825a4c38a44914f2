"""Facts of Hopper for the model of speed: rates, latencies and sizes, each with its source. No kernels.

*Guide*: NVIDIA's CUDA programming guide, results per clock and multiprocessor of compute capability 9.0. *Hopper*:
"Benchmarking and dissecting the NVIDIA Hopper GPU architecture", arXiv:2402.13499, measured on an H100. *Record*: the
records of `experiments/gpu/h200`, an H200 on 26 November 2026. *Assumed*: not measured as far as we know, or measured
for something else.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """An H200. Cycles are of a multiprocessor's clock; `pipes.py` has the costs of instructions."""

    num_cores: int = 132
    # Boost clock of an H200 SXM.
    clock_hz: float = 1.98e9
    # Rate of a bfloat16 product of 8192^3, of 1,070 TFLOP/s at the boost clock. Record: 713 and 703 in two processes,
    # with a clock of 1,725 and of 1,965 MHz by nvidia-smi. Prefill drew up to 680 of 700 W.
    product_flops: float = 708e12
    # A large copy, read and written bytes together, of nominal 4.8 TB/s. Record: 3.99 and 3.92 in two processes.
    copy_bytes_per_s: float = 3.95e12
    # Keys and values that decode reads. Record: 64 rows of 4k take 125.5 us longer than 32, for 537 MB; the same from
    # 8 rows of 8k on. Memory that is only read need not change direction, as for a copy. cuDNN on dense copies: 4.64.
    read_bytes_per_s: float = 4.28e12
    # Weights that products of few rows read. Record: with it the four products of a layer of Llama-8B with 8 rows are
    # computed 2 % faster than they were. XLA's product with the vocabulary, of 1.05 GB: 4.17.
    weight_bytes_per_s: float = 3.96e12
    # From the L2, 50 MB, for an array that the previous launch has just written. Chips and Cheese, "Nvidia's H100",
    # 2023: 5.5 TB/s, measured on an H100 PCIe with fewer multiprocessors.
    l2_bytes_per_s: float = 5.5e12
    # Bytes of the L2 that are kept until they are used, as both halves may have a copy.
    l2_kept_bytes: int = 25 << 20
    # Bytes that a multiprocessor receives from the L2 per cycle, half of its shared memory's rate. Assumed.
    core_bytes_per_cycle: int = 64
    # Schedulers of a multiprocessor; each issues an instruction per cycle. Guide.
    schedulers: int = 4
    # Multiply-adds of 16 bits per cycle and multiprocessor: 989.4 TFLOP/s at 1.83 GHz, NVIDIA's data sheet of the H100.
    tensor_flops: int = 4096
    # mma.sync reaches 0.63 of the rate of wgmma. Hopper, table of mma.
    mma_sync: float = 0.63
    # Bytes per cycle of shared memory. Guide.
    shared_bytes_per_cycle: int = 128
    # Per multiprocessor. Guide, table of technical specifications; 1 KiB of each block is reserved.
    shared_bytes: int = 233_472
    reserved_bytes: int = 1024
    registers: int = 65_536
    threads: int = 2048
    blocks: int = 32
    # Latencies in cycles. Hopper. Loads of a loop find data of earlier turns in the L1: lists of work.
    l1_latency: int = 41
    l2_latency: int = 263
    dram_latency: int = 479
    # Extra latency of a copy by TMA over a load. Assumed, from arXiv:2501.12084.
    tma_latency: int = 170
    # From a request to its data where memory is busy: 0.7 microseconds. Assumed.
    loaded_latency: int = 1400
    # Between two kernels of a CUDA graph, microseconds: the first's end to the second's first instruction. Published by
    # Hazy Research for an H100: "no bubbles", 1.3 us per kernel.
    launch_us: float = 1.3

    @property
    def tensor_clock_hz(self) -> float:
        """The clock at which tensor cores that are always busy would give `product_flops`.

        No kernel is assumed to get more of them: how power and waits share that loss is not known.
        """
        return self.product_flops / (self.num_cores * self.tensor_flops)

    def us(self, cycles: float) -> float:
        return cycles / self.clock_hz * 1e6

    def resident(self, registers: int, threads: int, shared_bytes: int) -> int:
        """Returns how many blocks of threads fit a multiprocessor."""
        of_warp = -(-registers * 32 // 256) * 256
        by_registers = self.registers // max(of_warp * -(-threads // 32), 1)
        by_shared = self.shared_bytes // (shared_bytes + self.reserved_bytes)
        return max(1, min(by_registers, by_shared, self.threads // threads, self.blocks))


H200 = Chip()
