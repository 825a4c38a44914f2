"""Loads the weights of a model directory or GGUF file, tensor by tensor, into the parameter tree.

On the CPU, only one full copy of each tensor exists: a buffer aligned for XLA, filled from the file in pieces and
handed over without copying. On an accelerator, it is a staging buffer, and one tensor is in flight at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.dtypes import canonical_dtype
from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.sources import model_path
from ksana_jax.devices.platforms import platform_of
from ksana_jax.devices.tuning import tuning
from ksana_jax.loading.config_json import load_config, read_json
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.gguf_config import gguf_dtype
from ksana_jax.loading.hints import prefix_hint
from ksana_jax.loading.kept import keeping, read_kept
from ksana_jax.loading.stored_tensor import StoredTensor
from ksana_jax.loading.views import sources_of
from ksana_jax.models.block_matrix import BlockMatrix
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.params import (
    Params,
    check_quantises,
    dtype_of,
    init_params,
    is_shape,
    num_params,
    param_shapes,
    quantised,
)
from ksana_jax.sharding.placement import ONE_DEVICE, Placement
from ksana_jax.sharding.shares import WHOLE_WEIGHT, Share
from ksana_jax.sharding.specs import field_of

logger = logging.getLogger("ksana_jax")
LOAD_FORMATS = ("auto", "dummy")
ALIGNMENT = 64  # bytes; XLA's CPU client requires it of a buffer that it adopts without a copy


@dataclasses.dataclass(frozen=True)
class WeightReader:
    """A function that reads a model's weights. digest: of all that they are read from. draws: reads no files."""

    read: Callable[[], Params]
    digest: Callable[[], str]
    draws: bool = False

    def __call__(self) -> Params:
        return self.read()

    def read_with_digest(self, kept: Callable[[str], Params | None] = lambda digest: None) -> tuple[str, Params]:
        """Reads weights, and returns their digest and them.

        Args:
          kept: returns weights of a digest that need not be read.

        Raises:
          LoadError: the files changed meanwhile.
        """
        before = self.digest()
        if (found := kept(before)) is not None:
            return before, found
        params = self.read()
        if self.digest() != before:
            raise LoadError("the model's files changed while their weights were read: load the model again")
        return before, params


def array_dtype(name: str) -> Any:
    """Returns the jax dtype of a name such as "bf16".

    Raises:
      ConfigError: weights cannot have this dtype.
    """
    kinds = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
    return jnp.dtype(kinds[canonical_dtype(name)])


def auto_dtype(model: str | os.PathLike[str]) -> str:
    """Returns the dtype for "auto": the one in the checkpoint's config.json, or "f32" if it has none.

    For a GGUF file, it is the dtype of the matrices, "f32" if they are quantised. Where float16 is multiplied much more
    slowly, as on CPUs, it becomes "f32".

    Raises:
      ConfigError: weights cannot have the dtype in config.json.
    """
    path = model_path(model, weights=False)
    if (gguf := gguf_of(path)) is not None:
        dtype = gguf_dtype(read_gguf(gguf))
    else:
        path = path / "config.json"
        values = read_json(path)
        name = "dtype" if values.get("dtype") is not None else "torch_dtype"  # transformers 5, and before
        given = values.get(name)
        dtype = "f32" if given in (None, "float64") else canonical_dtype(given, f"{path}: {name}")
    return "f32" if dtype in tuning(platform_of()).slow_dtypes else dtype


def load_model(
    source: str | os.PathLike[str] | ModelConfig,
    dtype: str = "f32",
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    embedding_device: Literal["device", "host"] = "device",
    placement: Placement = ONE_DEVICE,
) -> tuple[ModelConfig, Params]:
    """Loads a model, or draws random weights for its config.

    Args:
      source: a Hugging Face model directory, or a GGUF file; with "dummy", its config.json or a ModelConfig is enough.
      dtype: "f32", "bf16" or "f16" for the weights in memory, regardless of their dtype on disk.
      load_format: "auto" reads safetensors or GGUF; "dummy" draws random weights.
      seed: seed of the random weights.
      embedding_device: "host" leaves the token embedding in host memory, as a NumPy array.
      placement: of the weights; each of several devices gets its part of a tensor as it is read.

    Raises:
      ConfigError: the config or an argument is invalid.
      LoadError: files cannot be used; one line lists every tensor concerned.
    """
    config, read = open_model(source, dtype, load_format, seed, embedding_device, placement=placement)
    return config, read()


def open_model(
    source: str | os.PathLike[str] | ModelConfig,
    dtype: str = "f32",
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    embedding_device: Literal["device", "host"] = "device",
    quantization: str | None = None,
    placement: Placement = ONE_DEVICE,
    num_devices: int = 1,
) -> tuple[ModelConfig, WeightReader]:
    """Checks a model's config and files, and returns the config and a function that reads the weights; see
    `load_model`.

    Args:
      quantization: "stored" keeps matrices as they are stored, see `loading.kept`; other values change nothing here.
      num_devices: of the placement that weights are read for, which need not be given to learn the config.
    """
    kind = array_dtype(dtype)
    checks.require(checks.one_of("load_format", load_format, LOAD_FORMATS), error=ConfigError)
    config = source.validate() if isinstance(source, ModelConfig) else load_config(source)
    if embedding_device == "host":
        check_embedding_on_host(config)
    if quantization == "stored" and (load_format == "dummy" or isinstance(source, ModelConfig)):
        raise ConfigError("quantization is 'stored', but weights that no file stores are drawn in `dtype`")
    if load_format == "dummy":

        def place(path: Any, weight: jax.Array) -> Any:
            if embedding_device == "host" and field_of(path) == "embed":
                return np.asarray(weight)
            return placement.drawn(config, path, weight)

        def draw() -> Params:
            began, params = time.perf_counter(), init_params(config, seed, kind, place=place)
            _log("drew random weights", config, params, began)
            return params

        return config, WeightReader(draw, lambda: f"dummy {seed} {jax.__version__}", draws=True)
    if isinstance(source, ModelConfig):
        raise ConfigError("a ModelConfig has no weights; give a model directory, or load_format='dummy'")
    path = model_path(source)
    found = find_weights(path, config)
    check_tensors(config, found, str(source))
    if quantization == "stored":
        config = keeping(config, found, str(source), embedding_device, num_devices)

    def read() -> Params:
        began, params = time.perf_counter(), read_params(config, found, kind, str(source), embedding_device, placement)
        files = len({stored.path for stored in found.values()})
        _log(f"loaded {source} from {files} file{'s' * (files > 1)}", config, params, began)
        return params

    return config, WeightReader(read, functools.partial(digest_of_files, path))


def _log(done: str, config: ModelConfig, params: Params, began: float) -> None:
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    logger.info(
        "%s: %s weights, %s bytes, in %.1f s",
        done,
        f"{num_params(config):,}",
        f"{num_bytes:,}",
        time.perf_counter() - began,
    )


def check_embedding_on_host(config: ModelConfig) -> None:
    """Checks that keeping the token embedding on the host would free device memory.

    Raises:
      ConfigError: the embedding is also the output head, which the device needs.
    """
    if config.tie_embeddings:
        raise ConfigError(
            "embedding_device is 'host', but this model's embedding is its output head too (tied), "
            "which the device needs: nothing would be freed"
        )


def embedding_on_host(params: Params) -> Params:
    """Returns params with the token embedding in host memory; on the CPU, without copying it."""
    return dataclasses.replace(params, embed=np.asarray(params.embed))


def abstract_params(config: ModelConfig, dtype: str = "f32", quantization: str | None = None) -> Params:
    """Returns a Params of jax.ShapeDtypeStruct, the shapes and dtypes of the weights, for planning and tracing.

    quantization: as in `EngineConfig`.

    Raises:
      ConfigError: the dtype is unknown, or a part of the model does not state that it quantises.
    """
    check_quantises(config, quantization)
    kind = array_dtype(dtype)
    kept = dict(config.kept) if quantization == "stored" else {}

    def of(path: Any, shape: tuple[int, ...]) -> Any:
        stored = kept.get(jax.tree_util.keystr(path))
        of_numbers = dtype_of(field_of(path), kind)
        return BlockMatrix.shapes(shape, stored, kind) if stored else jax.ShapeDtypeStruct(shape, of_numbers)

    params = jax.tree_util.tree_map_with_path(of, param_shapes(config), is_leaf=is_shape)
    return jax.eval_shape(functools.partial(quantised, quantization=quantization), params)


def read_params(
    config: ModelConfig,
    found: Mapping[str, StoredTensor],
    dtype,
    source: str,
    embedding_device: str = "device",
    placement: Placement = ONE_DEVICE,
) -> Params:
    """Reads all weights of a config, and puts them on their devices, except perhaps the embedding.

    Args:
      found: tensors that `check_tensors` has accepted.

    Raises:
      LoadError: values are not finite, or the output head differs from the embedding to which it is tied.
    """
    _check_tied_head(config, found, source)
    kept = dict(config.kept)
    shapes, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=is_shape)
    leaves: list[Any] = []
    for index, (source_of, (path, shape)) in enumerate(zip(sources_of(config), shapes, strict=True)):
        reads = read_kept if jax.tree_util.keystr(path) in kept else read_weight
        read = functools.partial(reads, source_of.of(found), shape, dtype_of(field_of(path), dtype))
        if index == 0 and embedding_device == "host":  # the embedding is the first
            leaves.append(read())
        else:
            leaves.append(placement.weight(config, path, shape, read))
    return jax.tree.unflatten(tree, leaves)


def check_tensors(config: ModelConfig, found: Mapping[str, StoredTensor], source: str) -> None:
    """Checks names, shapes and dtypes of a checkpoint's tensors; reads none of them.

    Raises:
      LoadError: tensors are missing, unexpected, of another shape or of an unsupported dtype; all are listed, unless
        only their prefix differs.
    """
    expected = {name: shape for weight in sources_of(config) for name, shape in weight.tensors.items()}
    head, embed = _head_and_embed(config)
    allowed = expected | ({head: expected[embed]} if config.tie_embeddings else {})
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, stored in found.items():
        if name not in allowed:
            if not re.fullmatch(FAMILIES[config.family].buffers, name):
                problems.append(f"{name} is not part of this {config.family} config")
        elif stored.shape != allowed[name]:
            problems.append(f"{name} has shape {list(stored.shape)}, the config gives {list(allowed[name])}")
        elif stored.dtype not in stored.dtypes:
            problems.append(f"{name} is {stored.dtype}, supported: {', '.join(stored.dtypes)}")
    if problems and (hint := prefix_hint(embed, found)):
        raise LoadError(f"{source}: {hint}")
    if problems:
        raise LoadError(f"{source}: {len(problems)} tensors do not fit: {'; '.join(problems)}")


def _head_and_embed(config: ModelConfig) -> tuple[str, str]:
    names = FAMILIES[config.family].top_names
    return str(names["head"]), str(names["embed"])


def _check_tied_head(config: ModelConfig, found: Mapping[str, StoredTensor], source: str) -> None:
    head, embed = _head_and_embed(config)
    if config.tie_embeddings and head in found and not _same(found[head], found[embed]):
        raise LoadError(
            f"{source}: {head} differs from {embed} although tie_word_embeddings is true; "
            "supported: equal tensors, or tie_word_embeddings false"
        )


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    if a.dtype != b.dtype:
        return False
    pairs = zip(a.chunks(), b.chunks(), strict=True)
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for (_, x), (_, y) in pairs)


def read_weight(
    tensors: Sequence[StoredTensor], shape: tuple[int, ...], dtype, share: Share = WHOLE_WEIGHT
) -> np.ndarray:
    """Reads a weight, one tensor or a stack of several, or one device's part of it.

    Args:
      shape: of the whole weight. share: the part of each tensor to read.

    Raises:
      LoadError: values are not finite.
      ConfigError: a part of a stack is requested that is not a part of each of its tensors.
    """
    if share != WHOLE_WEIGHT and len(tensors) > 1 and not share.stacked:
        raise ConfigError(f"a weight stacked from {len(tensors)} tensors, such as {tensors[0].name}, cannot be divided")
    if share != WHOLE_WEIGHT and len(tensors[0].shape) > len(shape):  # a few numbers, with dimensions of 1
        return read_weight(tensors, shape, dtype)[share.rows]
    host = aligned_empty(share.shape(shape), dtype)
    of_one = share._replace(stacked=False).shape(tensors[0].shape)
    for stored, part in zip(tensors, host.reshape(len(tensors), *(of_one or (1,))), strict=True):
        rows = len(part) - share.padding
        part[rows:] = 0
        _fill(part[:rows], stored, share)
    return host


def _fill(out: np.ndarray, stored: StoredTensor, share: Share = WHOLE_WEIGHT) -> None:
    for rows, piece in stored.chunks(share.rows, share.columns):
        with np.errstate(over="ignore"):  # checked below
            out[rows] = piece
        if not all_finite(out[rows]):
            kind = out.dtype if all_finite(piece) else piece.dtype
            raise LoadError(f"{stored.path}: {stored.name} has values that are NaN or infinite in {kind.name}")


def all_finite(values: np.ndarray) -> bool:
    """True if all floats are finite, judged by exponent bits, because NumPy has no fast isfinite for bfloat16."""
    kind = {2: np.uint16, 4: np.uint32}[values.dtype.itemsize]
    exponent = kind(np.array(np.inf, values.dtype).view(kind))
    bits, step = values.reshape(-1).view(kind), 2**18  # pieces that stay in the cache
    return all(int((bits[i : i + step] & exponent).max()) < int(exponent) for i in range(0, len(bits), step))


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Returns an uninitialised array whose memory XLA's CPU client can adopt without a copy."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
