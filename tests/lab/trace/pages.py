"""Reads a page of a trace as a browser would: what it loads, links to and draws."""

from __future__ import annotations

import collections
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "img", "input", "link", "hr"}


@dataclasses.dataclass
class Page:
    """loads: addresses that the page itself fetches. links: of its anchors. tooltips: titles in each drawing, by id."""

    title: str
    loads: list[str]
    links: list[str]
    tooltips: dict[str, list[str]]

    @classmethod
    def of(cls, path: Path) -> Page:
        """Raises AssertionError unless every element is closed where it must be."""
        reader = _Reader()
        reader.feed(text := path.read_text(encoding="utf-8"))
        reader.close()
        assert not reader.open, f"left open: {reader.open}"
        styles = re.findall(r"url\(|@import", text)
        return cls(reader.title, reader.loads + styles, reader.links, dict(reader.tooltips))


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.loads, self.links = [], [], []
        self.title, self.drawing = "", None
        self.tooltips = collections.defaultdict(list)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.loads += [given[name] for name in ("src", "srcset", "xlink:href", "data") if name in given]
        if "href" in given:
            (self.links if tag == "a" else self.loads).append(given["href"])
        if tag == "svg":
            self.drawing = given["id"]
        if tag not in VOID:
            self.open.append(tag)
        self.loads += ["script"] if tag == "script" else []

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"
        if tag == "svg":
            self.drawing = None

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            if self.drawing is None:
                self.title += data
            else:
                self.tooltips[self.drawing].append(data)
