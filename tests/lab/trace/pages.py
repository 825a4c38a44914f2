"""Reads a page of a trace as a browser would: what it loads and links to, and the cells of its tables."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "img", "input", "link", "hr"}


@dataclasses.dataclass
class Page:
    """loads: addresses that the page itself fetches. links: of its anchors. rows: cells of each row of its tables."""

    title: str
    loads: list[str]
    links: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, path: Path) -> Page:
        """Raises AssertionError unless every element is closed where it must be."""
        reader = _Reader()
        reader.feed(text := path.read_text(encoding="utf-8"))
        reader.close()
        assert not reader.open, f"left open: {reader.open}"
        styles = re.findall(r"url\(|@import", text)
        return cls(reader.title, reader.loads + styles, reader.links, reader.rows)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.loads, self.links = [], [], []
        self.title, self.rows = "", []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.loads += [given[name] for name in ("src", "srcset", "xlink:href", "data") if name in given]
        if "href" in given:
            (self.links if tag == "a" else self.loads).append(given["href"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)
        self.loads += ["script"] if tag == "script" else []

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if "title" in self.open:
            self.title += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data
