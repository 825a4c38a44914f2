"""The page on routing: its code runs, and its table has every policy."""

import re
import sys
from pathlib import Path

from ksana_jax.serve.router import POLICIES, RoutedRequest, Router, RouterSettings

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "use" / "routing.md").read_text(encoding="utf-8")


def block(text):
    [code] = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return code


def test_the_first_example_runs():
    names = {}
    exec(compile(block(PAGE), "routing.md", "exec"), names)
    assert names["server"] in names["router"].servers and not names["router"].ledger.live


def test_the_policy_of_the_page_works(tmp_path, monkeypatch):
    page = (DOCS / "extend" / "routing.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(block(page))
    monkeypatch.syspath_prepend(tmp_path)
    policy = {"name": "mine:Stay", "max_wait_s": 1.0}
    router = Router("ab", policy, RouterSettings(block_size=100, prefill_tokens_per_s=1000))
    first = router.choose(RoutedRequest("0", 800, [b"a", b"ab"]), now=0.0)
    assert router.choose(RoutedRequest("1", 400, [b"a", b"ab"]), now=0.0) == first  # its wait, 0.8 s, is allowed
    assert router.choose(RoutedRequest("2", 400, [b"a", b"ab"]), now=0.0) != first
    sys.modules.pop("mine")


def test_the_table_has_every_policy():
    rows = re.findall(r"^\| \**(`.*?) \|", PAGE, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(POLICIES)
