"""Attention weights and hidden states of a request as its engine computes them, in memory or in a safetensors file."""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ksana_jax.core import checks, refusals
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import SamplingParams
from ksana_jax.core.units import byte_size
from ksana_jax.engine.completion import Completion
from ksana_jax.engine.kept import Tile
from ksana_jax.engine.llm import LLM
from ksana_jax.engine.prompts import Prompt, read_requests
from ksana_jax.engine.steps import Step
from ksana_jax.kv.layout import TEXT_POSITION
from ksana_jax.loading.tensor_files import write_header
from ksana_jax.runner.recording import Recorded, step_recorder

# Settings under which rows or heads are elsewhere too.
_APART = ("shared_prefix_attention", "tensor_parallel_size", "data_parallel_size", "distributed")


class Activations(NamedTuple):
    """Activations of a request's T tokens: its prompt, and its output without the last token.

    attention: [layers, heads, T, T] float32, weight that a query gives to a key, 0 where it does not attend.
    hidden: [layers, T, D] float32, the residual stream after each layer.
    """

    output: RequestOutput
    attention: np.ndarray
    hidden: np.ndarray


def activations(
    llm: LLM,
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    max_bytes: int = 2**30,
    path: str | os.PathLike[str] | None = None,
) -> Activations:
    """Completes a prompt and returns its attention weights and hidden states as the engine computes them: from cached
    keys as they are stored, under pattern, eviction and selection. Cached prefixes are not used.

    Each step is computed a second time, with XLA, from the pool that it has left.

    Args:
      prompt, sampling_params: as in `LLM.generate`; None computes the prompt alone.
      layers, heads: those to return, heads of queries; None returns all.
      max_bytes: maximum size of the arrays.
      path: safetensors file to hold them, "attention" and "hidden", instead of memory.

    Raises:
      ValueError: the arrays are too large, or the engine cannot tell them; the message says why.
      RuntimeError: requests are running.
    """
    params = sampling_params or SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    [asked] = read_requests(prompt, params, None, llm.tokenizer, None, streams=False)
    engine = llm.engine
    runner, model, eviction = llm.runner, engine.model, engine.scheduler.layout.eviction
    branches = (speculation := engine.scheduler.speculation) is not None and speculation.method.draws_trees
    used = engine.config.used() | {refusals.BRANCHES: branches}
    if found := [name for name in (refusals.BRANCHES, *_APART) if used[name]]:
        raise ValueError(f"activations are read from blocks of single rows on one device, not with {', '.join(found)}")
    if model.recurrent is not None:
        raise ValueError("activations are recorded in attention layers, and this model has recurrent layers")
    if params.num_sequences > 1:
        raise ValueError("activations are those of one sequence: n must be 1, and beam_width 0 or 1")
    if eviction is not None and eviction.method.low_codec:
        raise ValueError("activations need one token in each slot; kv_eviction keeps several in fewer bits")
    if eviction is not None and not eviction.method.hides and TEXT_POSITION not in runner.cache.leaves:
        raise ValueError("activations under kv_eviction need an engine with kept_tokens: it stores positions")
    layers, num_heads = _chosen("layers", layers, model.num_layers), model.layers[0].attention.num_heads
    heads = _chosen("heads", heads, num_heads)
    most = params.max_len(len(asked.prompt_token_ids), engine.max_model_len) - 1
    shapes = {"attention": (len(layers), len(heads), most, most), "hidden": (len(layers), most, model.d_model)}
    if (nbytes := 4 * sum(map(math.prod, shapes.values()))) > max_bytes:
        raise ValueError(
            f"activations of {len(layers)} layers, {len(heads)} heads and {most:,} tokens take {byte_size(nbytes)}, "
            f"max_bytes is {byte_size(max_bytes)}: choose layers and heads, or raise it"
        )
    # Cached prefixes would not be computed: no other request has this salt.
    name = f"activations-{secrets.token_hex(8)}"
    [request] = engine.new_requests([asked._replace(request_id=name, cache_salt=name)])
    engine.check_idle("activations are recorded only in between")
    arrays = {k: np.zeros(v, np.float32) for k, v in shapes.items()} if path is None else _in_file(path, shapes)
    recording = _Recording(llm, name, layers, heads, **arrays)
    engine.inspectors.append(recording)
    try:
        *_, output = engine.serve([request])
    finally:
        engine.inspectors.remove(recording)
    length = len(request.completions[0].seq.token_ids) - 1
    return Activations(output, recording.attention[:, :, :length, :length], recording.hidden[:, :length])


class _Recording:
    """Records one request; an inspector of its engine (`Engine.inspectors`)."""

    def __init__(self, llm: LLM, name: str, layers, heads, attention: np.ndarray, hidden: np.ndarray):
        self._name, self._layers, self._heads = name, layers, heads
        self.attention, self.hidden = attention, hidden
        self._layout, self._runner = llm.engine.scheduler.layout, llm.runner
        self._record = step_recorder(self._runner, layers)

    def __call__(self, step: Step, rows_of: dict[Completion, int]) -> None:
        rows = step.batch.rows.tolist()
        for completion, row in rows_of.items():
            if completion.seq.owner.request_id == self._name and row in rows:
                end = int(step.ends[rows.index(row)]) + 1
                tokens, found = range(end - int(step.batch.num_per_row[rows.index(row)]), end), self._record(step.input)
                while tokens:
                    tokens = tokens[self._add(Tile.of(step.input, tokens[0]), found, tokens) :]

    def _add(self, tile: Tile, found: Recorded, tokens: range) -> int:
        """Adds the first of some tokens, those in a tile; returns their number."""
        offset, width = tokens[0] - tile.first, tile.step.shape.parts[tile.part].width
        count, begin = min(width - offset, len(tokens)), tile.begin + offset
        # Rejected draft tokens, and a probe's, may come after the end; others take the places of those before it.
        kept = max(min(count, self.hidden.shape[1] - begin), 0)
        texts, layout = slice(begin, begin + kept), self._layout
        stored = functools.cache(functools.partial(tile.stored, self._runner, TEXT_POSITION))
        for index, layer in enumerate(self._layers):
            self.hidden[index, texts] = found.hidden[layer][tokens[0] : tokens[0] + kept]
            self.attention[index, :, texts] = 0
            spec, each = self._runner.config.layers[layer].attention, len(layout.places) // len(self._runner.ropes)
            for nth, head in enumerate(self._heads):
                place, own = divmod(layer * spec.num_heads + head, spec.num_heads // each)
                (group, at), method = layout.places[place], layout.evicts_from[place]
                for weights, slots in found.weights[place][tile.part]:
                    w = np.asarray(weights)[tile.nth, offset : offset + kept, own]
                    positions = np.asarray(slots)[tile.nth]
                    if method is not None and not method.hides:
                        of_head = stored(group)[at, own * spec.num_kv_heads // spec.num_heads]
                        positions = of_head[np.minimum(positions, len(of_head) - 1)]
                    attended = (w >= 0).any(axis=0)
                    rows, where = self.attention[index, nth, texts], positions[attended]
                    rows[:, where] = np.where(w[:, attended] >= 0, w[:, attended], rows[:, where])
        return count


def _chosen(name: str, given: Sequence[int] | None, count: int) -> tuple[int, ...]:
    found = tuple(range(count) if given is None else given)
    checks.require(*(checks.integer(name, number, 0, count - 1) for number in found))
    return found


def _in_file(path: str | os.PathLike[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Creates a safetensors file of zeros in float32; returns its arrays, which are written as they change."""
    found: dict[str, np.ndarray] = {}
    with open(path, "wb") as file:
        zeros = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}  # takes no memory
        for name, array in write_header(file, zeros).items():
            start = file.tell()
            file.truncate(start + array.nbytes)
            found[name] = np.memmap(path, np.float32, "r+", start, array.shape)
            file.seek(0, os.SEEK_END)
    return found
