"""Maps the name of a model to its path; only this file knows all forms of a name.

An existing path always takes precedence, so a name never hides a user's file.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from ksana_jax.core.errors import ConfigError, LoadError
from ksana_jax.core.files import open_to_read
from ksana_jax.core.plugins import nearest
from ksana_jax.core.shipped import model_names, shipped_model
from ksana_jax.core.sources import hub
from ksana_jax.core.sources.catalogue import FETCHABLE, fetched
from ksana_jax.core.units import byte_size

logger = logging.getLogger("ksana_jax")
MODEL_HELP = "a model: the path of a directory or .gguf file, or a name: shipped, fetched, or org/name of the hub"


def model_path(model: str | os.PathLike[str], *, weights: bool = True, download: bool = True) -> Path:
    """Returns the path of a model: a directory, or a .gguf file.

    Args:
      model: in this order, an existing path (~ is the home folder), the name of a shipped model, a name that `ksana
        fetch` knows, or a name of the Hugging Face hub (`HubName`), whose missing files are downloaded. A
        config.json stands for its directory.
      weights: False where config and tokenizer are enough; then only these are downloaded.
      download: False raises instead of downloading.

    Raises:
      LoadError: there is no such model, or it cannot be downloaded; one line says what to do.
    """
    text = expanded(model)
    hub_name = hub.HubName.parse(text)
    if text and os.path.exists(text):
        if hub_name is not None or text in FETCHABLE:
            _say_once(f"model {text} is the path {os.path.abspath(text)}; a name of the same form is not looked up")
        return _checked(Path(text))
    if (shipped := shipped_model(text)) is not None:
        return _checked(shipped)
    if text in FETCHABLE and (wanted := FETCHABLE[text]).is_model:
        if (path := fetched(text)) is not None:
            return path
        size = byte_size(wanted.num_bytes)
        raise LoadError(f"model {text!r} has not been fetched: run `ksana fetch {text}` ({size}, {wanted.licence})")
    if hub_name is not None:
        return hub.locate(hub_name, "weights" if weights else "config", download)
    raise LoadError(_unknown(text))


def adapter_path(adapter: str) -> Path:
    """Returns the folder of an adapter: a path, or a name of the Hugging Face hub, whose missing files are downloaded.

    Raises:
      LoadError: there is no such path, and it cannot be downloaded; one line says what to do.
    """
    text = expanded(adapter)
    hub_name = hub.HubName.parse(text)
    if os.path.exists(text) or hub_name is None or hub_name.file is not None:
        return Path(text)
    return hub.locate(hub_name, "adapter", download=True)


def expanded(path: str | os.PathLike[str]) -> str:
    """Returns a path with the home folder in the place of ~, unless there is a file of that name."""
    text = os.fspath(path)
    return text if os.path.exists(text) else os.path.expanduser(text)


def compose(model: str | os.PathLike[str], revision: str | None, gguf_file: str | None) -> str:
    """Returns the name of a model whose revision and GGUF file are given separately.

    Raises:
      ConfigError: together they are not a name of the hub, nor a file of a directory.
    """
    text = expanded(model)
    if revision is None and gguf_file is None:
        return text
    whole = text + ("" if revision is None else f"@{revision}") + ("" if gguf_file is None else f"/{gguf_file}")
    if revision is None and os.path.isdir(text):
        return whole
    found = hub.HubName.parse(whole)
    if found is None or revision not in (None, found.revision) or gguf_file not in (None, found.file):
        raise ConfigError(
            f"model, revision and gguf_file together are {whole!r:.200}, which is not a name of the hub: {hub.FORMS}"
        )
    return whole


def display_name(model: str | os.PathLike[str]) -> str:
    """Returns the name of a model without the folders of this machine: the last part of a path, other names as they
    are."""
    text = expanded(model)
    if os.path.exists(text):
        return Path(text).resolve().name if Path(text).name in ("", "..") else Path(text).name
    return text if hub.HubName.parse(text) is not None else Path(text).name


def _checked(path: Path) -> Path:
    if path.name == "config.json" and path.is_file():
        return path.parent
    if path.is_dir() or path.suffix == ".gguf":
        return path
    try:
        with open_to_read(path) as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError:
        is_gguf = False
    hint = "; it is a GGUF file: its name must end in .gguf" if is_gguf else ""
    raise LoadError(f"model {path} is a file; supported: a directory, its config.json, or a .gguf file{hint}")


def _unknown(text: str) -> str:
    close = nearest(text, [*model_names(), *(name for name, known in FETCHABLE.items() if known.is_model)])
    return (
        f"there is no model {text!r:.200}{f' (nearest: {close})' if close else ''}; supported: a directory or .gguf "
        f"file, a name that `ksana list models` prints, or one of the Hugging Face hub ({hub.FORMS})"
    )


@functools.cache
def _say_once(text: str) -> None:
    logger.info(text)
