"""Facts of a weight that an engine's features depend on: each field of `Params` and `LayerParams` states them as
metadata. For example, a matrix whose rows are divided among devices:

    w_new: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [F, D]
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Division = Literal["rows", "heads", "vocabulary", "columns", "whole", "once"]
Start = Literal["normal", "residual", "identity", "zeros", "ones"]
KEY = "weight"  # of a field's metadata


class Weight(NamedTuple):
    """Facts of a weight [out, in] or [out], as a field states them.

    divides: each device's part with `tensor_parallel_size`.
      "rows": as many rows as any other device; their products are the device's part of the result.
      "heads": the same; with fewer heads than devices, several devices have the rows of one head.
      "vocabulary": rows of its ids.
      "columns": as many columns as any other device, for its part of the argument; `Operators.summed` adds up the
        products.
      "whole": all of it.
      "once": all of it, but only one device adds it, to a product that is summed.
    starts: its random initialisation. "normal", "residual": normal numbers, in matrices that write to hidden states
      scaled down; "identity": as the kind of the model's norms says; "zeros"; "ones".
    quantises: `quantization` stores it as codes.
    packs: it is read through `linear` alone, so it may be a `PackedMatrix`; a stack, a stack of `PackedBlocks`.
    joins: field in which `models.joined` stacks the matrix with others, and its bias with theirs.
    stacked: it is a stack of such weights [E, ...], one for each expert; devices divide each of them.
    float32: it is of this type, whatever the engine's dtype is.
    """

    divides: Division
    starts: Start
    quantises: bool
    packs: bool = False
    joins: str | None = None
    stacked: bool = False
    float32: bool = False

    def local_rows(self, num_rows: int, num_devices: int, num_heads: int) -> int:
        """Returns the number of its rows on each of several devices, unless they are rows of a vocabulary.

        num_heads: see `params.heads_of`.
        """
        if self.divides == "heads":
            return num_rows // num_heads * max(num_heads // num_devices, 1)
        return num_rows // num_devices if self.divides == "rows" else num_rows


def matrix(divides: Division, *, starts: Start = "normal", joins: str | None = None) -> dict[str, Weight]:
    """Returns the metadata of a matrix of a layer that is read through `linear` alone."""
    return {KEY: Weight(divides, starts, quantises=True, packs=True, joins=joins)}


def of_experts(divides: Division, *, starts: Start = "normal") -> dict[str, Weight]:
    """Returns the metadata of a stack of matrices, each of which is read through `linear` alone."""
    return {KEY: Weight(divides, starts, quantises=True, packs=True, stacked=True)}


def vector(divides: Division, starts: Start, *, stacked: bool = False, float32: bool = False) -> dict[str, Weight]:
    """Returns the metadata of a norm, a bias, or logits of heads; or of a stack of biases, one for each expert."""
    return {KEY: Weight(divides, starts, quantises=False, stacked=stacked, float32=float32)}
