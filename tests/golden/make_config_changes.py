"""Finds the config fields that change what transformers computes: `config_changes.json`.

  python tests/golden/make_config_changes.py [family ...]      (needs `pip install -e .[parity]`; minutes on a CPU)

A golden model of each family is computed again with each field of its config changed, also within objects, one at a
time. The file has, by family, the whole config and each changed one, as [path, value], whose logits differ or whose
weights have other shapes. Changes that transformers refuses are left out. transformers 5.24.0 made the committed file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from make_golden import from_config, load
from transformers import AutoConfig, logging

HERE = Path(__file__).parent
# Fields of every config, which choose nothing that is computed here.
APART = {"architectures", "model_type", "transformers_version", "id2label", "label2id", "dtype", "_name_or_path"}
APART |= {"quantization_config", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
TOKENS = torch.arange(40)[None] * 37 % 128
LEAST = 1e-4  # of the logits' deviation


def changed(value: Any) -> list[Any]:
    """Returns other values for a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2, value + 1] if value else [1, 0.5]
    if isinstance(value, str):
        others = ("silu", "gelu", "gelu_new", "relu", "linear", "default", "multiquery_attention", "other")
        return [other for other in others if other != value]
    if isinstance(value, list):
        swap = {"full_attention": "sliding_attention", "sliding_attention": "full_attention", 0: 1, 1: 0}
        return [[swap.get(value[0], value[0]), *value[1:]]] if value else [[0]]
    return [8, 2, 0.5, True, "relu", [0]] if value is None else []


def changes(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if not path and name in APART:
            continue
        if isinstance(value, dict):
            yield from changes(value, (*path, name))
        else:
            yield from (((*path, name), other) for other in changed(value))


def with_change(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return values | {name: with_change(values[name], tuple(rest), value) if rest else value}


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits[0].float()


def is_changed(values: dict[str, Any], weights: dict[str, torch.Tensor], wanted: torch.Tensor) -> bool:
    """True if a config computes something else; False if it does not, or transformers refuses it."""
    try:
        config = AutoConfig.for_model(**values)
        attention = "sdpa" if values["model_type"] == "falcon" else "eager"
        model = from_config(config, attn_implementation=attention).eval()
        shapes = {name: weight.shape for name, weight in model.state_dict().items()}
        if shapes != {name: weight.shape for name, weight in weights.items()}:
            return True
        model.load_state_dict(weights)
        return bool((logits_of(model) - wanted).abs().max() > LEAST * wanted.std())
    except Exception:  # whatever its many parts raise
        return False


def main(names: list[str]) -> None:
    logging.set_verbosity_error()
    file = HERE / "config_changes.json"
    before = json.loads(file.read_text()) if names else {}
    found: dict[str, Any] = {name: of_family for name, of_family in before.items() if name not in names}
    for folder in sorted(path.parent for path in HERE.glob("*/config.json")):
        read = json.loads((folder / "config.json").read_text())
        family = read["model_type"]
        if family in found or (names and family not in names) or "quantization_config" in read:
            continue
        model = load(folder)
        values = {name: value for name, value in model.config.to_dict().items() if name not in APART}
        if isinstance(values.get("attn_config"), dict):
            values["attn_config"] = {k: v for k, v in values["attn_config"].items() if k not in APART}
        values |= {"model_type": family, "bos_token_id": None, "eos_token_id": None}
        weights, wanted = model.state_dict(), logits_of(model)
        assert not is_changed(values, weights, wanted), f"{folder.name} is not computed again"
        kept = [
            [path, other]
            for path, other in changes(values)
            if is_changed(with_change(values, path, other), weights, wanted)
        ]
        found[family] = {"config": values, "changes": kept}
        print(f"{family}: {len(kept)} changes of {len({path for path, _ in map(tuple, kept)})} fields")
    rows = [f'"{family}": {json.dumps(of_family)}' for family, of_family in sorted(found.items())]
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
