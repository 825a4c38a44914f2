"""Models and adapters of the Hugging Face hub: names, copies in the hub's cache, and downloads of missing files.

Only files that are read are downloaded. huggingface_hub is imported when the first name of the hub is met: importing it
takes longer than loading a small model.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import json
import logging
import os
import re
from pathlib import Path
from typing import Any, Literal

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
MAX_INDEX_BYTES = 16 * 2**20
MAX_PARTS = 1000

FORMS = "org/name, org/name@revision, org/name/file.gguf or org/name@revision/file.gguf"
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


class Incomplete(LoadError):
    """A copy of a model lacks files."""

    def __init__(self, folder: Path, missing: list[str]):
        more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        self.folder, self.missing = folder, missing
        self.says = f"its copy in the hub's cache, {folder}, lacks {', '.join(missing[:3])}{more}"
        super().__init__(self.says)


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
    try:
        folder = _copy(name, revision, wanted, local_files_only=True)
    except Exception as error:  # a download repairs any fault of the copy
        if not download:
            raise LoadError(f"{name} is not in the hub's cache, {constants.HF_HUB_CACHE}") from error
        lacking = f"there is no such path, and no complete copy in the hub's cache, {constants.HF_HUB_CACHE}"
        folder = _download(name, revision, wanted, error.says if isinstance(error, Incomplete) else lacking)
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


def _copy(name: HubName, revision: str | None, wanted: Wanted, **options: Any) -> Path:
    """Returns the snapshot of a model or adapter, after downloading missing files unless local_files_only is given.

    Raises:
      Incomplete: it lacks files. Otherwise huggingface_hub's errors.
    """
    if name.file is not None or wanted == "adapter":
        files = [*ADAPTER] if name.file is None else _parts(name.file)
        folder = _snapshot(name.repo, revision, files, options)
        return _complete(folder, files)
    weights = wanted == "weights"
    folder = _snapshot(name.repo, revision, [*SMALL_FILES, INDEX] if weights else SMALL_FILES, options)
    present = [file for file in SMALL_FILES if os.path.lexists(folder / file)]  # perhaps dangling links
    _complete(folder, [CONFIG, *present])
    if options.get("local_files_only") and not any(file in present for file in TOKENIZERS):
        # Other programs download single files. Whether the model has no tokenizer, only the hub knows.
        raise Incomplete(folder, [TOKENIZERS[0]])
    if weights:
        files = _weights(folder)
        folder = _snapshot(name.repo, folder.name, files, options)
        _complete(folder, files)
    return folder


def _snapshot(repo: str, revision: str | None, files: Any, options: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*map(glob.escape, files), *[f"{OTHER_TEMPLATES}/*.jinja"] * (CONFIG in files)]
    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, **options))
    if commit_of(folder) is None:
        raise LoadError(
            f"{repo}: {folder} is not a snapshot of the hub's cache; delete refs/{revision or 'main'} there"
        )
    return folder


def _complete(folder: Path, files: list[str]) -> Path:
    if missing := [file for file in dict.fromkeys(files) if not (folder / file).is_file()]:
        raise Incomplete(folder, missing)
    return folder


def _parts(file: str) -> list[str]:
    """Returns the files of a GGUF model that may be split: all parts of the one that is named."""
    if (part := _PART(file)) is None:
        return [file]
    if (count := int(part["count"])) > MAX_PARTS:
        raise LoadError(f"{file} has {count:,} parts; supported: at most {MAX_PARTS:,}")
    return [f"{part['stem']}-{n:05}-of-{part['count']}.gguf" for n in range(1, count + 1)]


def _weights(folder: Path) -> list[str]:
    """Returns the files of weights: one, or those that an index names. The loader explains why an index is unusable."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not os.path.lexists(index):
        return [SINGLE]
    if not index.is_file():  # a dangling link
        return [index.name]
    if index.stat().st_size > MAX_INDEX_BYTES:
        return []
    try:
        named = {*map(str, json.loads(index.read_bytes())["weight_map"].values())}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    if len(named) > MAX_PARTS:
        return []
    return sorted(name for name in named if name.endswith(".safetensors") and ".." not in Path(name).parts)


def _download(name: HubName, revision: str | None, wanted: Wanted, lacking: str) -> Path:
    """Downloads missing files. lacking: their description, for messages."""
    try:
        return _copy(name, revision, wanted)
    except Incomplete as error:
        raise LoadError(f"{name}: {_why_incomplete(name, error)}") from None
    except LoadError:
        raise
    except Exception as error:  # of any version of huggingface_hub, and of its HTTP client
        raise LoadError(f"{name}: {_why(name, error, lacking)}") from error


def _why_incomplete(name: HubName, error: Incomplete) -> str:
    """Returns why a download left files out: the hub does not have them, or it was not reached."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(name.repo, revision=commit_of(error.folder))
    except Exception as reason:
        return _why(name, reason, error.says)
    if not (absent := [file for file in error.missing if file not in files]):
        return f"{error.says}; delete the folder to download it again"
    if absent[0] in ADAPTER:
        return f"there is no {absent[0]} on the hub; an adapter has {' and '.join(ADAPTER)}"
    ggufs = [file for file in files if file.endswith(".gguf")]
    shown = ", ".join(ggufs[:8]) + (f" and {len(ggufs) - 8:,} more" if len(ggufs) > 8 else "")
    choose = f"; its GGUF files: {shown}" if ggufs else "; supported: safetensors and GGUF files"
    return f"there is no {absent[0]} on the hub{choose}"


def _why(name: HubName, error: BaseException, lacking: str) -> str:
    """Returns why a model cannot be downloaded and what to do, in one line."""
    from huggingface_hub import constants, errors

    # huggingface_hub reports an earlier error as "not in the cache".
    chain = _chain(error)

    def among(kind: type[BaseException]) -> BaseException | None:
        return next((each for each in chain if isinstance(each, kind)), None)

    if any(e.errno == errno.ENOSPC for e in chain if isinstance(e, OSError)) or "No space left" in str(error):
        return f"no space is left in {constants.HF_HUB_CACHE}; free some, or name another folder in HF_HOME"
    if among(errors.GatedRepoError):
        return "access is gated: accept its terms on its page of the hub, then log in (`hf auth login`, or HF_TOKEN)"
    if among(errors.RepositoryNotFoundError):
        return (
            "there is no such path, and no such model on the hub for you; for a private one, log in (`hf auth login`, "
            "or HF_TOKEN)"
        )
    if among(errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r} on the hub"
    if invalid := among(errors.HFValidationError):
        return f"not a name that the hub allows: {_line(invalid)}"
    if constants.HF_HUB_OFFLINE:
        return f"{lacking}, and HF_HUB_OFFLINE is set; unset it once to download what is missing"
    if refused := among(errors.HfHubHTTPError):
        return f"{lacking}, and the hub refuses: {_line(refused)}"
    return f"{lacking}, and the hub cannot be reached ({type(chain[-1]).__name__}: {_line(chain[-1])})"


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__
    return found


def _line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
