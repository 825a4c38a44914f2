"""Implementations of paged attention, in order of preference, and the choice among them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import jax

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.operator_settings import ATTENTION_GROUP, first_serving
from ksana_jax.devices.capabilities import stored_as_bits
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.native.target import register_targets
from ksana_jax.ops import kernel_limits, native_kernels
from ksana_jax.ops.attention import Attended, ragged_paged_attention
from ksana_jax.ops.kv_write import write
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.requirements import Requirements


class PagedAttention(NamedTuple):
    """The functions of an implementation, which steps call; the contracts of `kv_write.write` and
    `attention.ragged_paged_attention`.

    schedule: (context, cache, num_heads) -> the work that layers of one pattern share in a step, for `attend`; None if
      they share none.
    """

    write: Callable[..., tuple[Any, KVCache]]
    attend: Callable[..., Attended]
    schedule: Callable[..., Any] | None = None


class Implementation(NamedTuple):
    """An implementation of paged attention.

    load: returns its functions. It imports what they need, so that a machine without a GPU never waits for Pallas.
    unsupported: why it cannot serve some needs, or None.
    needs: hardware and software that it runs on, for readers; empty where there are no special needs.
    trees: whether it reads `StepArrays.ancestors`; steps with trees of drafts take the reference otherwise.
    """

    name: str
    load: Callable[[], PagedAttention]
    unsupported: Callable[[Requirements], str | None]
    needs: str = ""
    trees: bool = False

    def load_for_trees(self) -> PagedAttention:
        """Returns the functions for steps with trees of drafts, of an engine that has chosen this one."""
        return self.load() if self.trees else REFERENCE


def _gpu() -> Any:
    """Imports Pallas."""
    from ksana_jax.ops import gpu_kernels

    return gpu_kernels


def _not_hopper(needs: Requirements) -> str | None:
    if needs.compute_capability != (9, 0):
        return f"needs an NVIDIA GPU of compute capability 9.0, {_device(needs)}"
    return kernel_limits.unsupported(_gpu().HOPPER, needs)


def _not_triton(needs: Requirements) -> str | None:
    if needs.compute_capability is None or needs.compute_capability < (8, 0):
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, {_device(needs)}"
    return kernel_limits.unsupported(_gpu().TRITON, needs)


def _device(needs: Requirements) -> str:
    found = needs.compute_capability
    return f"this is {needs.platform}" + ("" if found is None else f" {found[0]}.{found[1]}")


def _hopper() -> PagedAttention:
    kernels = _gpu().HOPPER
    return PagedAttention(kernels.write, kernels.attend, kernels.schedule)


def _triton() -> PagedAttention:
    kernels = _gpu().TRITON
    return PagedAttention(kernels.write, kernels.attend)  # they make their work list in each layer


def _native() -> PagedAttention:
    register_targets()
    return PagedAttention(native_kernels.NATIVE.write, native_kernels.NATIVE.attend)


REFERENCE = PagedAttention(write, ragged_paged_attention)
_GPU = "an NVIDIA GPU of compute capability"
# In order of preference; the reference runs everywhere and stays last.
IMPLEMENTATIONS = (
    Implementation("hopper", _hopper, _not_hopper, f"{_GPU} 9.0"),
    Implementation("triton", _triton, _not_triton, f"{_GPU} 8.0 or later"),
    Implementation("native", _native, native_kernels.unsupported, "a CPU, and C++ of a wheel or a compiler"),
    Implementation("xla", lambda: REFERENCE, lambda needs: None, trees=True),
)


def implementations() -> tuple[Implementation, ...]:
    """Returns all implementations in order of preference: installed packages' first, then our own.

    Raises:
      ConfigError: a package's entry point is not an Implementation of that name, or cannot be imported.
    """
    return (*_installed(), *IMPLEMENTATIONS)


@functools.cache
def _installed() -> tuple[Implementation, ...]:
    found = []
    for point in entry_points(group=ATTENTION_GROUP):
        try:
            made = point.load()
        except Exception as error:  # any error of another package
            raise ConfigError(f"entry point {point.name} = {point.value} of {ATTENTION_GROUP}: {error}") from error
        if not isinstance(made, Implementation) or made.name != point.name:
            raise ConfigError(
                f"entry point {point.name} = {point.value} of {ATTENTION_GROUP} is no Implementation of that name"
            )
        found.append(made)
    return tuple(found)


def choose(needs: Requirements, name: str = "auto") -> Implementation:
    """Returns the first implementation that supports the requirements, or the one with the given name.

    Raises:
      ValueError: there is none of that name, or it does not serve.
    """
    return first_serving("attention", name, implementations(), lambda i: i.unsupported(needs))


# A Llama-8B.
EXAMPLE = ModelConfig(num_heads=32, num_kv_heads=8, head_dim=128)


def example_needs() -> Requirements:
    """Returns the requirements of `EXAMPLE` in bfloat16 with blocks of 64, on this process's device."""
    layout = layout_of(EXAMPLE, dtype="bf16", block_size=64, as_bits=stored_as_bits(jax.local_devices()[0]))
    return Requirements.of(EXAMPLE, layout, query_dtype="bfloat16")


def explain(needs: Requirements | None = None) -> list[tuple[str, bool, str]]:
    """Returns, for each implementation of paged attention, its name, whether it is used, and why (not).

    Args:
      needs: by default a Llama-8B in bfloat16 with blocks of 64, on this process's device.
    """
    if needs is None:
        needs = example_needs()
    chosen = choose(needs)
    rows = []
    for i in implementations():
        reason = i.unsupported(needs) or ("preferred here" if i is chosen else f"{chosen.name} is preferred")
        rows.append((i.name, i is chosen, reason))
    return rows
