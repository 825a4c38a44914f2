"""Habits that read as translated: absent from code and pages since a reader stumbled over them."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What to write instead.
HABITS = {
    r"\banew\b": "again, restart, recompute, rebuild",
    r"\b[Tt]akes note\b": "Registers, Marks, Updates, Called when",
    r"\b[Ww]hoever\b": "anyone who, the caller, authors",
    r"\bis not there\b|\bare not there\b": "is missing, is absent, is not attached",
    r"\bto be had\b": "is available",
    r"\blies\b": "is",
    r"\bafresh\b": "again",
    r"\bas ever\b": "as usual",
    r"\bcan(not)? be had\b": "is available, is supported",
    r"\bbeside\b": "next to, besides, compared with",
    r"\b[Ii]n place of\b": "instead of",
    r"\bgo(es)? on\b": "continues",
    r"\bby turns\b": "alternately, round-robin",
    r"\b(no|some)body\b": "no request, another user",
    r'help="(of|whose|its) ': "a noun",
    r'"""(Of|What|Whether|Which)\b|# (Of|Whether) ': "a noun or a verb; True if",
}
PLACES = ("ksana_jax/*.py", "pallas_kernels/*.py", "experiments/*.py", "docs/*.md", "README.md", "CONTRIBUTING.md")


def test_code_and_pages_are_free_of_them():
    listed = subprocess.run(["git", "ls-files", *PLACES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [
        f"{name}:{number}: {match[0]!r}; write {instead}"
        for name in listed.split()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        for habit, instead in HABITS.items()
        if (match := re.search(habit, line))
    ]
    assert len(listed.split()) > 500 and found == []
