"""Models and adapters of the Hugging Face hub: names, and their snapshots, of which only files that are read are
downloaded.

huggingface_hub is imported when the first name of the hub is met: importing it takes longer than loading a small model.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import re
from pathlib import Path
from typing import Literal

from ksana_jax.core.errors import LoadError

logger = logging.getLogger("ksana_jax")

# Files that a model directory may have besides its weights.
CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
SMALL_FILES = (CONFIG, "generation_config.json", *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json")
SMALL_FILES += ("added_tokens.json", "chat_template.jinja")
# A folder of chat templates besides the default one, NAME.jinja.
OTHER_TEMPLATES = "additional_chat_templates"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files of an adapter that PEFT has saved.
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")

FORMS = "org/name or org/name@revision/file.gguf"
_WORD = r"\w[\w.+-]*"
# Components of paths cannot be "..", because none starts with a dot.
_FILE = r"(?:[^./\\\x00-\x1f][^/\\\x00-\x1f]*/)*[^./\\\x00-\x1f][^/\\\x00-\x1f]*\.gguf"
_PARSED = re.compile(
    rf"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*?)(?:@(?P<revision>refs/(?:pr|convert)/{_WORD}|{_WORD}))?(?:/(?P<file>{_FILE}))?"
).fullmatch
_BRANCH = re.compile(rf"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)@(?P<revision>{_WORD}(?:/{_WORD})+)").fullmatch
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf").fullmatch
_COMMIT = re.compile(r"[0-9a-f]{40}").fullmatch

# The files of a name that are needed: config and tokenizer of a model, its weights as well, or an adapter.
Wanted = Literal["config", "weights", "adapter"]
_SMALL = (*SMALL_FILES, f"{OTHER_TEMPLATES}/*.jinja")
_PATTERNS = {"config": _SMALL, "weights": (*_SMALL, INDEX, "model*.safetensors"), "adapter": ADAPTER}


@dataclasses.dataclass(frozen=True)
class HubName:
    """The name of a model or adapter on the hub: `org/name`, `org/name@revision`, or either with `/file.gguf` after it.

    A revision is a branch, a tag, a commit or refs/pr/N; None is the default branch.
    """

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parses a text as a name; None if it has another form. No part of a name can leave a folder."""
        found = _PARSED(text) or _BRANCH(text)
        if found is None or found["repo"].endswith(".gguf"):  # a file that is not here
            return None
        return cls(**{"file": None, **found.groupdict()})

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f"/{self.file}" if self.file else "")


# The commit of each revision that this process has resolved: it keeps to one, even if another is pushed.
_commits: dict[tuple[str, str, str | None], str] = {}


def locate(name: HubName, wanted: Wanted, download: bool) -> Path:
    """Returns the directory, or the GGUF file, of a model or adapter of the hub; missing files are downloaded.

    A complete copy in the cache is used without asking the hub whether there is a newer one.

    Args:
      wanted: a GGUF file always has weights.
      download: False only looks in the cache.

    Raises:
      LoadError: it is unavailable; one line says what to do.
    """
    from huggingface_hub import constants

    key = (str(constants.HF_HUB_CACHE), name.repo, name.revision)
    revision = _commits.get(key, name.revision)
    folder = _cached(name, revision, wanted)
    if folder is None and not download:
        raise LoadError(f"{name} is not in the hub's cache, {constants.HF_HUB_CACHE}")
    if folder is None:
        folder = _downloaded(name, revision, wanted)
    if key not in _commits:
        _commits[key] = folder.name
        logger.info("%s is commit %s of the hub, in %s", name, folder.name, folder)
    return folder if name.file is None else folder / name.file


def commit_of(path: Path) -> str | None:
    """Returns the commit, 40 hex digits, of a file or directory in the hub's cache; None elsewhere."""
    for snapshot in (path, *path.parents):
        if snapshot.parent.name == "snapshots" and snapshot.parent.parent.name.startswith("models--"):
            return snapshot.name if _COMMIT(snapshot.name) else None
    return None


def _snapshot(name: HubName, revision: str | None, wanted: Wanted, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    patterns = _PATTERNS[wanted] if name.file is None else map(glob.escape, _parts(name.file))
    settings = {"allow_patterns": [*patterns], "local_files_only": local_files_only}
    return Path(snapshot_download(name.repo, revision=revision, **settings))


def _cached(name: HubName, revision: str | None, wanted: Wanted) -> Path | None:
    """Returns the snapshot in the cache; None if it may lack files."""
    try:
        folder = _snapshot(name, revision, wanted, local_files_only=True)
    except Exception:  # a download repairs any fault of the copy
        return None
    # Other programs download single files. Whether a model has no tokenizer, only the hub knows.
    is_model = name.file is None and wanted != "adapter"
    no_tokenizer = is_model and not any((folder / file).is_file() for file in TOKENIZERS)
    return None if no_tokenizer or _missing(name, wanted, folder) else folder


def _missing(name: HubName, wanted: Wanted, folder: Path) -> list[str]:
    if name.file is not None:
        files = _parts(name.file)
    elif wanted == "adapter":
        files = [*ADAPTER]
    else:
        files = [CONFIG, *(_weights(folder) if wanted == "weights" else ())]
    return [file for file in files if not (folder / file).is_file()]


def _parts(file: str) -> list[str]:
    """Returns the files of a GGUF model that may be split: all parts of the one that is named."""
    if (part := _PART(file)) is None:
        return [file]
    return [f"{part['stem']}-{n:05}-of-{part['count']}.gguf" for n in range(1, int(part["count"]) + 1)]


def _weights(folder: Path) -> list[str]:
    """Returns the files of weights: one, or those that an index names. The loader explains why an index is unusable."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE]
    try:
        return sorted({*map(str, json.loads((folder / INDEX).read_bytes())["weight_map"].values())})
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def _downloaded(name: HubName, revision: str | None, wanted: Wanted) -> Path:
    """Returns the snapshot after downloading missing files."""
    from huggingface_hub import HfApi, constants

    lacking = f"there is no such path, and no complete copy in the hub's cache, {constants.HF_HUB_CACHE}"
    try:
        folder = _snapshot(name, revision, wanted)
        if not (missing := _missing(name, wanted, folder)):
            return folder
        lacking = f"its copy in the hub's cache, {folder}, lacks {missing[0]}"
        listed = HfApi().list_repo_files(name.repo, revision=folder.name)
    except Exception as error:  # of any version of huggingface_hub, and of its HTTP client
        raise LoadError(f"{name}: {_why(name, error, lacking)}") from error
    if missing[0] in listed:
        command = f"hf download {name.repo} {missing[0]} --revision {folder.name}"
        raise LoadError(f"{name}: {lacking}; `{command}` adds it")
    ggufs = [file for file in listed if file.endswith(".gguf")]
    shown = ", ".join(ggufs[:8]) + (f" and {len(ggufs) - 8:,} more" if len(ggufs) > 8 else "")
    choose = f"its GGUF files: {shown}" if ggufs else "supported: safetensors and GGUF files"
    raise LoadError(f"{name}: there is no {missing[0]} on the hub; {choose}")


def _why(name: HubName, error: Exception, lacking: str) -> str:
    """Returns why a model cannot be downloaded and what to do, in one line."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the library reports a hub that it does not reach as a file that is not in the cache
    if isinstance(error, errors.GatedRepoError):
        return "access is gated: accept its terms on its page of the hub, then log in (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such path, and no such model on the hub; for a private one, log in (`hf auth login`, or "
            "HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r} on the hub"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
    if isinstance(error, errors.HFValidationError):
        return f"not a name that the hub allows: {line}"
    if constants.HF_HUB_OFFLINE:
        return f"{lacking}, and HF_HUB_OFFLINE is set; unset it once to download what is missing"
    return f"{lacking}, and the download failed ({type(error).__name__}: {line})"
