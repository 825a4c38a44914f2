"""Small quantised checkpoints, packed by definitions of their own, and the numbers that they stand for."""

import ml_dtypes
import numpy as np

from ksana_jax.core.config import ModelConfig
from tests.loading.models_on_disk import random_tensors, write_model

CONFIG = ModelConfig(
    vocab_size=70, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96, bos_id=1, eos_ids=(2,)
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns that a word has, from its low bits on


def packed(numbers: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Unsigned numbers [rows, columns] in words int32 [rows, columns * bits / 32]."""
    per_word = 32 // bits
    filled = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    words = []
    for row in filled.tolist():
        for at in range(0, len(row), per_word):
            word = row[at : at + per_word]
            words.append(sum(word[column] << bits * i for i, column in enumerate(order or range(per_word))))
    return np.array(words, np.uint32).view(np.int32).reshape(len(numbers), -1)


def drawn(rng, shape, bits: int, group: int, sym: bool, scales=np.float16):
    """Codes [out, in] and zeros [out, groups], unsigned, scales [out, groups], and groups of the columns [in]."""
    groups = np.arange(shape[1]) // group
    of_groups = (shape[0], groups[-1] + 1)
    codes = rng.integers(0, 1 << bits, shape)
    zeros = np.full(of_groups, 1 << bits - 1) if sym else rng.integers(0, 1 << bits, of_groups)
    return codes, zeros, rng.uniform(0.5, 2, of_groups).astype(scales) * scales(0.5 / (1 << bits)), groups


def numbers_of(codes, zeros, scales, groups) -> np.ndarray:
    """The definition, in float32."""
    return (codes - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]


def gptq(rng, shape, *, bits=4, group=32, sym=True, desc_act=False, version="gptq", scales=np.float16):
    codes, zeros, scales, groups = drawn(rng, shape, bits, group, sym, scales)
    if desc_act:
        groups = rng.permutation(groups)
    stored = packed(zeros.T, bits)
    if version == "gptq":  # less 1 each, with borrows, as GPTQModel stores them
        stored = (stored.view(np.uint32) - np.uint32({4: 0x11111111, 8: 0x01010101}[bits])).view(np.int32)
    return {
        "qweight": packed(codes, bits).T.copy(),
        "qzeros": stored,
        "scales": scales.T.copy(),
        "g_idx": groups.astype(np.int32),
    }, numbers_of(codes, zeros, scales, groups)


def gptq_config(*, bits=4, group=32, sym=True, desc_act=False, version="gptq"):
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    return config | {"checkpoint_format": version}


def write_quantised(folder, quantise, settings, config=CONFIG, plain=("lm_head", "embed_tokens"), change=None):
    """A checkpoint whose matrices are quantised, and its twin in float32.

    quantise: of a generator and a shape, returns the tensors of a matrix by the last component of their names, and its
    numbers. plain: parts of names that stay as they are. change: called with the tensors before they are written.
    """
    rng, tensors, twin = np.random.default_rng(0), {}, {}
    for name, values in random_tensors(config).items():
        if values.ndim != 2 or any(part in name for part in plain):
            tensors[name] = twin[name] = values
            continue
        parts, twin[name] = quantise(rng, values.shape)
        tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    if change is not None:
        change(tensors)
    folder.mkdir(exist_ok=True, parents=True)
    return (
        write_model(folder / "quantised", tensors, config, quantization_config=settings),
        write_model(folder / "twin", twin, config),
    )


def awq(rng, shape, *, group=32, scales=np.float16):
    codes, zeros, scales, groups = drawn(rng, shape, 4, group, False, scales)
    return {
        "qweight": packed(codes.T, 4, AWQ_ORDER),
        "qzeros": packed(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.copy(),
    }, numbers_of(codes, zeros, scales, groups)


def awq_config(*, group=32):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def fp8(rng, shape, *, block=(128, 128)):
    codes = rng.standard_normal(shape).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, [-(-size // part) for size, part in zip(shape, block, strict=True)]).astype(np.float32)
    rows, columns = (np.arange(size) // part for size, part in zip(shape, block, strict=True))
    return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * scales[rows][:, columns]


def fp8_config(*, block=(128, 128)):
    return {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(rng, shape, *, bits=4, group=32, sym=True, actorder=False, scales=np.float32):
    """compressed-tensors, pack-quantized; actorder as versions before 0.20 wrote it."""
    codes, zeros, scales, groups = drawn(rng, shape, bits, group, sym, scales)
    if actorder:
        groups = rng.permutation(groups)
    parts = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": np.array(shape, np.int64)}
    parts |= {} if sym else {"weight_zero_point": packed(zeros.T, bits).T.copy()}
    parts |= {"weight_g_idx": groups.astype(np.int32)} if actorder else {}
    return parts, numbers_of(codes, zeros, scales, groups)


def compressed_config(*, bits=4, group=32, sym=True, **weights):
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": sym} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
