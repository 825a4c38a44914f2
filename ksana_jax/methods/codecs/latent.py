"""Latents as codes of 8 bits in groups, next to their rotated numbers in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.base import numbers
from ksana_jax.methods.codecs.scaled import ScaledCodec

# Numbers of a latent that share a scale.
GROUP = 128
_CODES = ScaledCodec("int8", 127.0)


class Latent8:
    """Stores a latent as int8 codes with a float32 scale for each 128 numbers, and the rotated numbers in bfloat16:
    656 bytes for 512 and 64 of them. The error of a latent's number is at most half a step, its group's largest
    magnitude / 254.

    A vector is what `models.latents` stores: half of the R rotated numbers, half of the latent, and the other halves.
    The latent has a multiple of 128 numbers, so that R is the rest of H.

    Source: the layout of FlashMLA's `fp8_ds_mla`, github.com/deepseek-ai/FlashMLA, which has float8_e4m3 codes.
    """

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        rotated, groups = head_dim % GROUP, head_dim // GROUP
        if not groups or rotated % 2:
            raise ConfigError(
                f"kv_cache_dtype latent8 stores a multiple of {GROUP} numbers and an even rest, head_dim is {head_dim}"
            )
        return {
            "kv": ((groups * GROUP,), "int8"),
            "scale": ((groups,), "float32"),
            "rotated": ((rotated,), "bfloat16"),
        }

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        half = x.shape[-1] % GROUP // 2
        halves = x.reshape(*x.shape[:-1], 2, -1)
        latent = halves[..., half:].reshape(*x.shape[:-1], -1, GROUP)
        codes = _CODES.encode(latent, xp)
        rotated = halves[..., :half].reshape(*x.shape[:-1], -1).astype("bfloat16")
        return codes | {"kv": codes["kv"].reshape(*x.shape[:-1], -1), "rotated": rotated}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        codes, scale = stored["kv"], stored["scale"]
        latent = _CODES.decode({"kv": codes.reshape(*scale.shape, GROUP), "scale": scale}, xp)
        rotated = numbers(stored["rotated"], "bfloat16", xp).astype(xp.float32)
        halves = [part.reshape(*codes.shape[:-1], 2, -1) for part in (rotated, latent)]
        return xp.concatenate(halves, axis=-1).reshape(*codes.shape[:-1], -1)
