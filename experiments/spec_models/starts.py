"""Writes a target and what draft models for it start from: `python -m experiments.spec_models.starts FOLDER`.

FOLDER/target is ksana-tiny grown to ten times its size: it computes the same, at the cost of a model of 20M parameters.
FOLDER/pruned is the first and the last layer of ksana-tiny, which draft models start from. Both have its tokenizer.
FOLDER/outputs has texts that ksana-tiny, and so the target, has sampled after excerpts of the files that it was trained
on.

Source of growing in depth: LLaMA Pro, arXiv:2401.02415, section 3.1.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.files import write_atomic
from ksana_jax.core.sources import model_path
from ksana_jax.lab.runs.stdlib_corpus import source_texts, split_texts
from ksana_jax.loading import export_hf, load_model
from ksana_jax.models.params import LayerParams, Params, init_params

SOURCE = "ksana-tiny"
NUM_LAYERS, D_FF = 8, 4096
NUM_OUTPUTS, PER_FILE, PROMPT_TOKENS, NUM_TOKENS = 2048, 8, 32, 256


def main(folder: Path) -> None:
    source, params = load_model(SOURCE)
    target = dataclasses.replace(source, num_layers=NUM_LAYERS, d_ff=D_FF)
    _write(folder / "target", target, grow(params, init_params(target)))
    pruned = params.replace(layers=(params.layers[0], params.layers[-1]))  # pyright: ignore[reportAttributeAccessIssue]
    _write(folder / "pruned", dataclasses.replace(source, num_layers=2), pruned)
    write_outputs(folder / "outputs")


def grow(params: Params, drawn: Params) -> Params:
    """Returns weights of a deeper model with wider MLPs that computes the same as `params`.

    Each n-th layer is one of the source's. Those between add nothing to the residual stream, and neither do the units
    by which MLPs are wider: their output matrices are zero.

    Args:
      drawn: of the shapes wanted, whose number of layers is a multiple of the source's.
    """
    every = len(drawn.layers) // len(params.layers)
    layers = [
        _widened(params.layers[place // every], layer) if place % every == 0 else _silent(layer)
        for place, layer in enumerate(drawn.layers)
    ]
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def _silent(drawn: LayerParams) -> LayerParams:
    zeros = {name: jnp.zeros_like(getattr(drawn, name)) for name in ("w_o", "w_down")}
    return drawn.replace(**zeros)  # pyright: ignore[reportAttributeAccessIssue]


def _widened(layer: Any, drawn: Any) -> LayerParams:
    units = layer.w_gate.shape[0]
    wider = {
        "w_gate": drawn.w_gate.at[:units].set(layer.w_gate),
        "w_up": drawn.w_up.at[:units].set(layer.w_up),
        "w_down": jnp.zeros_like(drawn.w_down).at[:, :units].set(layer.w_down),
    }
    return layer.replace(**wider)


def write_outputs(folder: Path) -> None:
    """Writes texts sampled from the target as files, which are a corpus for `experiments.training`."""
    llm = LLM(SOURCE, max_model_len=NUM_TOKENS, max_num_seqs=128)
    tokenizer, texts = llm.get_tokenizer(), split_texts(source_texts())[0]
    rng, prompts = np.random.default_rng(0), []
    for index in rng.integers(0, len(texts), NUM_OUTPUTS).tolist():
        ids = tokenizer.encode(texts[index][1], add_special_tokens=False)
        start = int(rng.integers(0, max(len(ids) - PROMPT_TOKENS, 1)))
        prompts.append([tokenizer.bos_id, *ids[start : start + PROMPT_TOKENS - 1]])
    params = [
        SamplingParams(max_tokens=NUM_TOKENS - len(ids), ignore_eos=False, seed=i) for i, ids in enumerate(prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    folder.mkdir(parents=True, exist_ok=True)
    sampled = [[*output.prompt_token_ids[1:], *output.check().outputs[0].token_ids] for output in outputs]
    for at in range(0, len(sampled), PER_FILE):
        text = "\n".join(map(tokenizer.decode, sampled[at : at + PER_FILE]))
        write_atomic(folder / f"{at // PER_FILE:03}.py", text)


def _write(folder: Path, config: ModelConfig, params: Params) -> None:
    export_hf(folder, config, params)
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path(SOURCE) / name, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
