"""Finds and reads the tensors of GGUF files under Hugging Face names. Knows blocks only as bytes of a row.

Converters change two things, which reading undoes. Rows of queries and keys of Llama and related models are permuted:
the two numbers that a rotation pairs are neighbours in the file, and half a head apart here. Norms of Gemma have 1
added: subtracting it in float32 gives a weight w for which 1 + w is the stored number, bit for bit above 0.5.
Source: llama.cpp, conversion of Llama and Gemma.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.files import open_to_read
from ksana_jax.core.gguf_file import TYPES, GGUFFile, TensorInfo
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.loading.gguf_blocks import FLOATS, apart, decode
from ksana_jax.loading.gguf_hybrids import GROUPED, GUESSING, RECURRENT, TILED, row_order
from ksana_jax.loading.stored_tensor import Apart, StoredTensor
from ksana_jax.loading.views import OfFields, PartOfTensor, sources_of
from ksana_jax.models.block_matrix import FORMS
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.families.family import Name, View
from ksana_jax.models.families.fields import MAX_EXPERTS
from ksana_jax.models.params import LayerParams, param_shapes, stated

# GGUF names by field of Params and LayerParams.
TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
TOP_NAMES |= {"positions": "position_embd.weight"}
LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "w_q": "attn_q.weight",
    "b_q": "attn_q.bias",
    "q_norm": "attn_q_norm.weight",
    "w_k": "attn_k.weight",
    "b_k": "attn_k.bias",
    "k_norm": "attn_k_norm.weight",
    "w_v": "attn_v.weight",
    "b_v": "attn_v.bias",
    "w_o": "attn_output.weight",
    "b_o": "attn_output.bias",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "w_gate": "ffn_gate.weight",
    "b_gate": "ffn_gate.bias",
    "w_up": "ffn_up.weight",
    "b_up": "ffn_up.bias",
    "w_down": "ffn_down.weight",
    "b_down": "ffn_down.bias",
    "post_mlp_norm": "post_ffw_norm.weight",
    "w_router": "ffn_gate_inp.weight",
    "w_gate_experts": "ffn_gate_exps.weight",
    "w_up_experts": "ffn_up_exps.weight",
    "w_down_experts": "ffn_down_exps.weight",
    "w_shared_gate": "ffn_gate_inp_shexp.weight",
}
# Names of the MLP that each token passes through, where there are experts as well.
SHARED_NAMES = {f"w_{part}": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")}
# Names around attention to latents.
LATENT_NAMES = {
    "w_q_plain": "attn_q.weight",
    "w_q_a": "attn_q_a.weight",
    "q_a_norm": "attn_q_a_norm.weight",
    "w_q_b": "attn_q_b.weight",
    "w_kv_a": "attn_kv_a_mqa.weight",
    "kv_a_norm": "attn_kv_a_norm.weight",
    "w_uk": "attn_k_b.weight",
    "w_uv": "attn_v_b.weight",
    "choice_bias": "exp_probs_b.bias",
}
# Names that families have instead of these.
FALCON_PARALLEL = {"attn_norm": "attn_norm_2.weight", "mlp_norm": "attn_norm.weight"}
GPT_OSS_NAMES = {"mlp_norm": "post_attention_norm.weight", "sink_logits": "attn_sinks.weight"}
GPT_OSS_NAMES |= {"post_attn_norm": "", "b_router": "ffn_gate_inp.bias"}
GPT_OSS_NAMES |= {f"b_{part}_experts": f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")}
# Architectures whose rows of queries and keys converters permute.
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid")
# Tensors that hold several weights, by the field of the first, for families with a view of them.
FUSED = {"attn_qkv.weight": "w_q", "attn_qkv.bias": "b_q"}
# Divisors of the frequencies of a rope; the config has them.
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
WITH_LONGROPE = ("phi3", "minicpm3")
# UK and UV of all heads, as Hugging Face has them.
KV_B = "attn_kv_b.weight"
_OF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")


@dataclasses.dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor in a GGUF file.

    Args:
      info: where its blocks are.
      num_heads: heads whose rows are permuted; None if rows are in order.
      undo: gives the values from those of the file, if these were changed.
    """

    info: TensorInfo
    num_heads: int | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None
    dtypes = tuple(kind.name for kind in TYPES.values())

    @property
    def value_bytes(self) -> int:
        return 4 if self.undo else FLOATS.get(self.dtype, np.dtype(np.float32)).itemsize

    @property
    def form(self) -> str | None:
        return self.dtype if self.dtype in FORMS else None

    @property
    def block(self) -> int:
        return self.info.type.num_values

    def apart(self, rows: slice, columns: slice) -> Apart:
        begin, end, _ = columns.indices(self.shape[1])
        _, size, num_bytes = self.info.type
        blocks = self.blocks(rows)[:, begin // size * num_bytes : end // size * num_bytes]
        return apart(self.dtype, np.ascontiguousarray(blocks))

    def blocks(self, rows: slice = slice(None)) -> np.ndarray:
        """Returns the blocks of rows, uint8 [rows, bytes per row], in Hugging Face's order; all values of a tensor
        with one dimension are one row.

        Raises:
          LoadError: the file cannot be read, or has become shorter.
        """
        num_rows = self.shape[0] if len(self.shape) > 1 else 1
        first, stop, _ = rows.indices(num_rows)
        if self.num_heads is None or len(self.shape) == 1:
            return self._stored(first, stop)
        size = num_rows // self.num_heads
        head = first // size * size  # the first row of the first head
        stored = self._stored(head, min(-(-stop // size) * size, num_rows))
        return stored[_stored_rows(np.arange(first, stop), size) - head]

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        if len(self.shape) == 1:
            values = decode(self.dtype, self.blocks())[0]
            if self.num_heads is not None:
                values = values[_stored_rows(np.arange(len(values)), len(values) // self.num_heads)]
            values = values[rows]
        elif columns == slice(None):
            blocks = self.blocks(rows)
            values = decode(self.dtype, blocks).reshape(len(blocks), *self.shape[1:])
        else:
            _, size, num_bytes = self.info.type
            begin, end, step = columns.indices(self.shape[1])
            first, last = begin // size, -(-end // size)  # the blocks that the columns are in
            values = decode(self.dtype, self.blocks(rows)[:, first * num_bytes : last * num_bytes])
            values = values[:, begin - first * size : end - first * size : step]
        return self.undo(values) if self.undo else values

    def _stored(self, first: int, stop: int) -> np.ndarray:
        row_bytes = self.info.num_bytes // (self.shape[0] if len(self.shape) > 1 else 1)
        try:
            with open_to_read(self.path) as file:
                file.seek(self.info.offset + first * row_bytes)
                data = np.fromfile(file, np.uint8, (stop - first) * row_bytes)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror or error}") from None
        if len(data) < (stop - first) * row_bytes:
            raise LoadError(f"{self.path}: {self.name} is cut off: the file has become shorter")
        return data.reshape(stop - first, row_bytes)


@dataclasses.dataclass(frozen=True)
class TransposedHeads(StoredTensor):
    """A stack of a matrix [columns, rows] for each head, as one matrix [heads * rows, columns]."""

    stack: StoredTensor
    dtypes = GGUFTensor.dtypes

    @property
    def value_bytes(self) -> int:
        return self.stack.value_bytes

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        size = self.stack.shape[2]
        first, stop, _ = rows.indices(self.shape[0])
        head = first // size
        found = self.stack.read(slice(head, -(-stop // size)), slice(None)).swapaxes(1, 2)
        return found.reshape(-1, found.shape[2])[first - head * size : stop - head * size, columns]


def _stored_rows(rows: np.ndarray, size: int) -> np.ndarray:
    """Returns where a converted Llama stores rows of heads of `size` rows: i of the first half is row 2 i of the head,
    i of the second half row 2 i + 1."""
    head, row = np.divmod(rows, size)
    half, pair = np.divmod(row, size // 2)
    return head * size + 2 * pair + half


def as_stored(info: TensorInfo, name: str | None = None, num_heads: int | None = None, undo: Any = None) -> GGUFTensor:
    """Returns a tensor of a GGUF file, under another name if one is given; see `GGUFTensor`."""
    return GGUFTensor(info.path, name or info.name, info.type.name, info.shape, info, num_heads, undo)


def _minus_one(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32) - 1


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # values from 0 become infinite or NaN, which loading refuses
        return np.log(-values.astype(np.float64)).astype(np.float32)


def experts_of(info: TensorInfo, config: ModelConfig) -> list[TensorInfo]:
    """Returns the matrices of a stack of experts [E, out, in]; of more than any config has, the stack itself, whose
    shape is then refused."""
    if info.shape[0] > MAX_EXPERTS // config.num_layers:
        return [info]
    num_bytes = info.num_bytes // info.shape[0]
    return [
        dataclasses.replace(info, shape=info.shape[1:], offset=info.offset + index * num_bytes)
        for index in range(info.shape[0])
    ]


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Returns the GGUF names of a layer's weights, by field."""
    if config.family == "gpt_oss":
        return LAYER_NAMES | GPT_OSS_NAMES
    if config.family == "falcon" and config.norm_placement == "parallel":
        return LAYER_NAMES | FALCON_PARALLEL
    latents = LATENT_NAMES if "w_kv_a" in FAMILIES[config.family].layer_names else {}
    gated = {"mlp_norm": "post_attention_norm.weight", "w_out_gate": "attn_q.weight"} if config.out_gate else {}
    return LAYER_NAMES | latents | gated | (SHARED_NAMES if config.experts is not None else {})


def permuted_heads(architecture: str, config: ModelConfig) -> dict[str, int]:
    """Returns the number of heads of each weight whose rows converters permute, by field."""
    q, k = config.num_heads, config.num_kv_heads
    return {"w_q": q, "b_q": q, "w_k": k, "b_k": k} if architecture in PERMUTED else {}


def top_names(config: ModelConfig) -> dict[str, str]:
    """Returns the GGUF names of weights outside layers, by field."""
    return TOP_NAMES | ({"final_norm": "token_embd_norm.weight"} if config.family == "lfm2" else {})


def find_gguf_tensors(file: GGUFFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns the tensors of a GGUF file by the Hugging Face names of the config's family; unknown ones keep theirs."""
    family = FAMILIES[config.family]
    found: dict[str, StoredTensor] = {}
    in_parts: dict[str, tuple[View, dict[str, Sequence[StoredTensor]]]] = {}
    architecture = file.metadata["general.architecture"]
    heads, num_layers = permuted_heads(architecture, config), config.num_layers
    num_read = num_layers + (file.metadata.get(f"{architecture}.{GUESSING}", 0) if config.recurrent else 0)
    shapes, recurrent = param_shapes(config).layers, RECURRENT.get(config.family, {})
    expected = {name: shape for source in sources_of(config) for name, shape in source.tensors.items()}
    top = {name: field for field, name in top_names(config).items()}
    of_layer = {name: field for field, name in layer_names(config).items()}
    of_layer |= {name: field for name, field in FUSED.items() if isinstance(family.layer_names.get(field), View)}
    for names in (top, of_layer):  # norms may have biases
        names |= {f"{name[:-6]}bias": field for name, field in list(names.items()) if field.endswith("norm")}
    plain_layers = config.experts.plain_layers if config.experts else ()
    of_shared = {LAYER_NAMES[field]: field for field in SHARED_NAMES}
    for name, info in file.tensors.items():
        if name == ROPE_FACTORS or (architecture in WITH_LONGROPE and name in LONGROPE.values()):
            continue
        layer = _OF_LAYER.fullmatch(name)
        if layer and num_layers <= int(layer[1]) < num_read:
            continue
        layer = layer if layer and int(layer[1]) < num_layers else None  # or the name is not part of the config
        if layer and layer[2] == KV_B and isinstance(view := family.layer_names.get("w_uk"), View):
            name = family.layer_prefix.format(layer[1]) + view.tensor
            found[name] = as_stored(info, name)
            continue
        index = int(layer[1]) if layer else 0
        plain, spec = bool(layer) and index in plain_layers, config.layers[index].recurrent if layer else None
        of_this = of_layer | (of_shared if plain else {})
        if spec is not None:
            of_this = of_this | {name: fields[0] for name, fields in recurrent.items()}
        field = of_this.get(layer[2], "") if layer else top.get(name, "")
        of_field: Name = name
        if layer and (field in family.layer_names or field in family.recurrent_names):
            of_field = family.name(field, index, config.norm_placement, plain, spec is not None)
            if isinstance(of_field, View) and _is_part(of_field, info, field, layer[2], shapes[index]):
                parts = in_parts.setdefault(of_field.tensor, (of_field, {}))[1]
                several = of_field.fields if layer[2] in FUSED else (field,)
                several = several if spec is None else recurrent.get(layer[2], several)
                parts |= _of_fields(several, info, field, shapes[index], config)
                continue
            if field.endswith("_experts") and len(info.shape) == 3:
                for number, expert in enumerate(experts_of(info, config)):
                    one = str(of_field).format(number)
                    found[one] = as_stored(expert, one)
                continue
        elif not layer and field in family.top_names:
            of_field = family.top_names[field]
        if isinstance(of_field, View):
            of_field = of_field.tensor
        name = of_field if isinstance(of_field, str) else of_field[name.endswith("bias")]
        undo = _log if field == "log_decay" else _minus_one if adds_one(config, field) else None
        info = _with_ones(info, expected.get(name, info.shape))
        found[name] = as_stored(info, name, heads.get(field) if spec is None else None, undo)
        if layer and spec is not None and is_tiled(config):
            found[name] = _in_order(found[name], recurrent.get(layer[2], ()), shapes[index], spec)
    found.update({name: _combined(name, *parts) for name, parts in in_parts.items()})
    return found


def adds_one(config: ModelConfig, field: str) -> bool:
    """True if converters add 1 to a weight."""
    return config.norm == "rms_plus_one" and field.endswith("norm") and field not in ("delta_norm", "mamba_norm")


def is_tiled(config: ModelConfig) -> bool:
    """True if files have heads of values of the config's delta rules in an order of their own, see `gguf_hybrids`."""
    spec = config.recurrent
    return config.family in TILED and isinstance(spec, DeltaRuleSpec) and spec.num_key_heads < spec.num_value_heads


def _with_ones(info: TensorInfo, wanted: tuple[int, ...]) -> TensorInfo:
    """Returns a tensor in a wanted shape that differs only in dimensions of 1, or has one dimension."""
    same = [n for n in info.shape if n > 1] == [n for n in wanted if n > 1]
    flat = len(wanted) == 1 and math.prod(info.shape) == wanted[0]
    return dataclasses.replace(info, shape=wanted) if same or flat else info


def _in_order(stored: StoredTensor, fields: tuple[str, ...], shapes: LayerParams, spec: Any) -> StoredTensor:
    """Returns a tensor of a recurrent layer of a model that `is_tiled`, with its heads in order."""
    rows = {field: getattr(shapes, field)[0] for field in fields}
    if not fields or sum(rows.values()) != stored.shape[0] or stored.shape[1:] != getattr(shapes, fields[0])[1:]:
        return stored  # not of the layer's kind, or of another shape, which is then refused
    if fields != ("w_o",):
        order = row_order(rows, spec)
        return PartOfTensor(stored.path, stored.name, stored.dtype, stored.shape, stored, order, transposed=False)
    for order in (row_order({"w_v": stored.shape[1]}, spec), np.arange(rows["w_o"])):  # transposed, and back
        shape = stored.shape[::-1]
        stored = PartOfTensor(stored.path, stored.name, stored.dtype, shape, stored, order, transposed=True)
    return stored


def _is_part(view: View, info: TensorInfo, field: str, name: str, shapes: LayerParams) -> bool:
    """True if a tensor has a part of a view's, or its rows in another order."""
    if field.endswith("_experts"):
        return True
    own = len(view.fields) > 1 and info.shape[0] == getattr(shapes, field)[0]
    return name not in GROUPED and (own or view.transposed or view.groups is not None)


def _of_fields(
    fields: tuple[str, ...], info: TensorInfo, field: str, shapes: LayerParams, config: ModelConfig
) -> dict[str, Sequence[StoredTensor]]:
    """Returns the weights that a tensor has one after the other, or one, each with its rows in order, by field."""
    if field in ("w_uk", "w_uv") and len(info.shape) == 3:
        heads, first, second = info.shape
        if field == "w_uv":
            return {field: [as_stored(dataclasses.replace(info, shape=(heads * first, second)))]}
        shape = heads * second, first
        return {field: [TransposedHeads(info.path, info.name, info.type.name, shape, as_stored(info))]}
    sizes = [getattr(shapes, name)[0] for name in fields]
    whole, ends = as_stored(info), np.cumsum(sizes)
    if len(fields) == 1 or info.shape[0] != ends[-1]:  # whose shape is then refused
        return {field: list(map(as_stored, experts_of(info, config) if stated(field, "loading").stacked else [info]))}
    return {
        name: [PartOfTensor(info.path, info.name, whole.dtype, (size, *info.shape[1:]), whole, rows, transposed=False)]
        for name, size, rows in zip(fields, sizes, np.split(np.arange(ends[-1]), ends[:-1]), strict=True)
    }


def _combined(name: str, view: View, fields: dict[str, Sequence[StoredTensor]]) -> OfFields:
    """Returns the tensor, under its Hugging Face name, that a file has in parts."""
    field, parts = next(iter(fields.items()))
    first, stack = parts[0], (len(parts),) if stated(field, "loading").stacked else ()
    shape = (sum(each[0].shape[0] for each in fields.values()), *first.shape[1:])
    return OfFields(first.path, name, first.dtype, (*stack, *(shape[::-1] if view.transposed else shape)), fields)
