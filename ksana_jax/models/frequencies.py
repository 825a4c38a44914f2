"""Frequencies of rotary position embeddings and of their scaled variants, from a config."""

from __future__ import annotations

import math

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.rope import Rope


def layer_ropes(config: ModelConfig, max_len: int | None = None) -> tuple[Rope, ...]:
    """Returns the rope of each layer; layers with equal `RopeConfig` share one object. max_len: see `make_rope`."""
    ropes = {
        spec.rope: make_rope(spec.rope, spec.head_dim, max_len) for spec in (layer.attention for layer in config.layers)
    }
    return tuple(ropes[layer.attention.rope] for layer in config.layers)


def make_rope(config: RopeConfig, head_dim: int, max_len: int | None = None) -> Rope:
    """Computes the frequencies of a rope.

    Args:
      max_len: tokens of the longest text to serve. "dynamic" and "longrope" use it: cached keys cannot change
        frequency as a text grows, so all keys use the longest text's (up to original_max_len, a short text's).

    Raises:
      ValueError: the kind is unknown, or its numbers give frequencies that are not finite in float32.
    """
    dims = config.dims(head_dim)
    with np.errstate(all="ignore"):
        rope = _make_rope(config, dims, max_len)
    if dims < head_dim:
        still = (0, (head_dim - dims) // 2)
        scale = np.pad(np.full(dims // 2, rope.scale, np.float32), still, constant_values=1)
        rope = Rope(np.pad(rope.inv_freq, still), 1.0 if rope.scale == 1 else scale)
    if not (np.isfinite(rope.inv_freq).all() and np.isfinite(np.float32(rope.scale)).all()):
        raise ValueError(f"rope has frequencies or a scale that are not finite: {config}")
    return rope


def row_order(config: RopeConfig, head_dim: int, neighbours: bool) -> np.ndarray:
    """Returns the row of a checkpoint's head for each row of a head here, [H], where i is rotated with i + H/2.

    Args:
      neighbours: True if the checkpoint rotates 2 i with 2 i + 1, not i with i + dims/2, in its first `dims` rows.
    """
    dims = config.dims(head_dim)
    rotated, still = np.arange(dims), np.arange(dims, head_dim)
    pairs = rotated.reshape(-1, 2).T if neighbours else rotated.reshape(2, -1)
    return np.concatenate([pairs, still.reshape(2, -1)], axis=1).reshape(-1)


def _make_rope(config: RopeConfig, head_dim: int, max_len: int | None) -> Rope:
    if config.kind == "none":
        return Rope(np.zeros(head_dim // 2, np.float32), 1.0)
    base = config.theta
    if config.kind == "dynamic":
        longest, original = max_len or 0, config.original_max_len or 0
        if longest > original:
            stretch = config.factor * longest / original - (config.factor - 1)
            base *= stretch ** (head_dim / (head_dim - 2))
    inv_freq = base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.kind in ("default", "dynamic"):
        return Rope(inv_freq.astype(np.float32), 1.0)
    if config.kind == "factors":
        return Rope((inv_freq / np.array(config.factors)).astype(np.float32), 1.0)
    if config.kind == "linear":
        return Rope((inv_freq / config.factor).astype(np.float32), 1.0)
    if config.kind == "llama3":
        return Rope(_llama3(config, inv_freq).astype(np.float32), 1.0)
    if config.kind == "longrope":
        return _longrope(config, inv_freq, max_len)
    if config.kind == "yarn":
        return _yarn(config, inv_freq, head_dim)
    raise ValueError(
        f"rope kind {config.kind!r} is not one of default, linear, dynamic, llama3, yarn, longrope, factors, none"
    )


def _llama3(config: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Stretches long wavelengths, keeps short ones and interpolates in between (as released with Llama 3.1)."""
    original = float(config.original_max_len or 0)
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    mix = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    mix = np.clip(mix, 0.0, 1.0)
    return inv_freq * (mix + (1 - mix) / config.factor)


def _longrope(config: RopeConfig, inv_freq: np.ndarray, max_len: int | None) -> Rope:
    """Divides frequencies by the factors of short or of long texts (arXiv:2402.13753, section 3.3)."""
    original, scale = config.original_max_len or 0, config.attention_factor
    factors = config.factors if (max_len or 0) > original else config.short_factors
    if scale is None:
        scale = math.sqrt(1 + math.log(config.factor) / math.log(original)) if config.factor > 1 else 1.0
    return Rope((inv_freq / np.array(factors)).astype(np.float32), scale)


def _yarn(config: RopeConfig, inv_freq: np.ndarray, head_dim: int) -> Rope:
    """Computes YaRN frequencies (arXiv:2309.00071, section 3.2) and attention factor (section 3.3)."""
    original = float(config.original_max_len or 0)

    def dimension(num_turns: float) -> float:
        """Returns the pair of dimensions that makes num_turns turns within the original context."""
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    freq = inv_freq * (1 - ramp) + inv_freq / config.factor * ramp

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    scale = config.attention_factor
    if scale is None:
        if config.mscale and config.mscale_all_dim:
            scale = mscale(config.mscale) / mscale(config.mscale_all_dim)
        else:
            scale = mscale(1.0)
    return Rope(freq.astype(np.float32), float(scale))
