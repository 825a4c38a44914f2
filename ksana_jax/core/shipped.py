"""Finds models and configurations that ship with the package by name. No jax.

An existing path of an experiment takes precedence, so a name never hides a user's file; `core.sources.resolve` does the
same for models.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# setup.py copies the repository's configs/ into the wheel; a checkout and an editable installation use it in place.
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
CONFIGS = next((place for place in _PLACES if (place / "quickstart.yaml").is_file()), None)
_MODELS = (_PACKAGE / "assets", *([CONFIGS / "models"] if CONFIGS else []))
_EXPERIMENTS = (CONFIGS, CONFIGS / "experiments") if CONFIGS else ()


def shipped_model(name: str) -> Path | None:
    """Returns the directory of a shipped model; None if there is none of that name.

    `configs/models/NAME` is such a name too, so that experiments run outside a checkout.
    """
    return _shipped(Path(name), _MODELS, "")


def experiment_path(name: str | os.PathLike[str]) -> Path:
    """Returns the YAML file of an experiment, given by path or by the name of a shipped one (`quickstart`)."""
    return _find(Path(name), _EXPERIMENTS)


def model_names() -> list[str]:
    """Returns the names of the shipped models; those under configs/ have no weights."""
    return sorted(path.parent.name for folder in _MODELS for path in folder.glob("*/config.json"))


def experiments() -> dict[str, Path]:
    """Returns the YAML files of the shipped experiments by name, sorted."""
    return dict(sorted((path.stem, path) for folder in _EXPERIMENTS for path in folder.glob("*.yaml")))


def papers() -> list[str]:
    """Returns the names of the papers that `ksana reproduce` repeats."""
    return sorted(path.stem for path in (CONFIGS / "papers").glob("*.yaml")) if CONFIGS else []


def _find(path: Path, folders: tuple[Path, ...]) -> Path:
    return path if path.exists() else _shipped(path, folders, ".yaml") or path


def _shipped(path: Path, folders: tuple[Path, ...], suffix: str) -> Path | None:
    if CONFIGS is not None and path.parts[:1] == ("configs",):
        inside = CONFIGS.joinpath(*path.parts[1:])
        return inside if inside.exists() else None
    if len(path.parts) == 1:
        found = (folder / f"{path.name.removesuffix(suffix)}{suffix}" for folder in folders)
        return next((candidate for candidate in found if os.path.exists(candidate)), None)
    return None
