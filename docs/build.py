"""Builds the documentation as HTML, offline: python docs/build.py [OUT]. Warnings are errors. `make docs` runs it.

Pages are plain Markdown that can also be read on a code host: in docs/ and Markdown files elsewhere in the
repository, which link to each other by path. They are copied into one tree, and their links are adapted to it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
# The table of contents, by reader: captions, and the pages of a folder under them, in this order.
ORDER = {
    "learn": "tutorial concepts glossary architecture",
    "use": "experiments python models evaluation speculative serving proxy routing workloads simulator jax "
    "coming-from-vllm benchmarks",
    "extend": "README eviction selection codec proposer scheduling replacement routing task bench pattern "
    "model-family new-accelerator",
    "reference": "commands yaml api models eviction accelerator status decisions",
}
BESIDE = {
    "learn": ["examples/README.md"],
    "extend": ["CONTRIBUTING.md", "pallas_kernels/README.md"],
    "reference": ["CHANGELOG.md"],
}
CONTENTS = {
    folder.capitalize(): [f"docs/{folder}/{name}.md" for name in names.split()] + BESIDE.get(folder, [])
    for folder, names in ORDER.items()
} | {"Results": ["docs/results.md", "README.md"]}
STUDIES = [str(readme.relative_to(ROOT)) for readme in sorted(ROOT.glob("experiments/*/README.md"))]
INDEX = "docs/README.md"


def page_of(path: str) -> str:
    """Returns a page's name in the tree: "docs/README.md" is index, "docs/use/models.md" use-models."""
    if path == INDEX:
        return "index"
    name = path.removeprefix("docs/").removesuffix(".md").removesuffix("/README")
    return name.lower().replace("/", "-")


PAGES = {path: page_of(path) for path in (INDEX, *(path for paths in CONTENTS.values() for path in paths), *STUDIES)}


def stage(tree: Path) -> None:
    """Copies the pages, their images and the files that they link to.

    Raises:
      ValueError: a link has no target.
    """
    shutil.copy(ROOT / "docs" / "conf.py", tree)
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        text = LINK.sub(lambda link, path=path: moved(link, path, tree), text)
        if path == INDEX:
            text += "".join(contents(caption, paths) for caption, paths in CONTENTS.items())
        if path == "docs/results.md":
            text += contents("Studies", STUDIES)
        (tree / f"{page}.md").write_text(text, encoding="utf-8")


def contents(caption: str, paths: list[str]) -> str:
    pages = "\n".join(PAGES[path] for path in paths)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def moved(link: re.Match, path: str, tree: Path) -> str:
    """Returns a page's link adapted to the tree: to another page or a copy of a file; links to sites are unchanged."""
    mark, text, target, heading = link[1], link[2], link[3], link[4] or ""
    if "://" in target:
        return link[0]
    there = os.path.normpath(os.path.join(os.path.dirname(path), target))
    page = PAGES.get(there) or PAGES.get(f"{there}/README.md")
    if page:
        return f"[{text}]({page}.md{heading})"
    source = ROOT / there
    if not source.is_file():
        raise ValueError(f"{path}: {target} is not a file of the repository")
    name = f"files/{there}" + ".txt" * (source.suffix == ".md")  # Sphinx would take it for a page
    copy = tree / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, copy)
    return f"{mark}[{text}]({name})"


def main(out: str = "docs/_build") -> int:
    from sphinx.cmd.build import build_main

    sys.path.insert(0, str(ROOT))  # docstrings of this checkout, whichever one is installed
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        code = build_main(["-q", "-W", "--keep-going", "-n", "-E", "-b", "html", folder, out])
    if code == 0:
        print(f"{out}/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
