"""Suites of JSON schemas with instances against the grammars of `structured_outputs`, token by token.

JSON Schema's own tests:
pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
python -m experiments.grammar.suite jsonschema-4.26.0/json/tests/draft2020-12

MaskBench (real schemas of JSONSchemaBench), every tenth file of github.com/guidance-ai/jsonschemabench at ba103c7:
python -m experiments.grammar.suite jsonschemabench/maskbench/data 10

A schema is refused with its reason before any token, or it is enforced: then a grammar allows each valid instance in
one of its spellings (orders of properties, 1 for 1.0), and no invalid one in any. Prints counts by file or source,
reasons, failures, and the times of masks.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax import StructuredOutputsParams
from ksana_jax.core.sources import model_path
from ksana_jax.sampling.grammar import Grammars
from ksana_jax.tokenizers import load_tokenizer

MODEL, MAX_SPELLINGS = "smollm2", 24


def ordered(value: Any, orders: list[list[str]]) -> Any:
    """Returns a value with the properties of each object in the order of those in a schema that have most of them."""
    if isinstance(value, list):
        return [ordered(each, orders) for each in value]
    if isinstance(value, dict):
        names = max(orders, key=lambda names: (len(value.keys() & names), -len(names)), default=[])
        keys = sorted(value, key=lambda key: names.index(key) if key in names else len(names))
        return {key: ordered(value[key], orders) for key in keys}
    return value


def properties(schema: Any) -> Iterator[list[str]]:
    """Yields the names of the properties of each object in a schema, in their order."""
    if isinstance(schema, dict):
        if isinstance(found := schema.get("properties"), dict):
            yield [*found]
        schema = [*schema.values()]
    for each in schema if isinstance(schema, list) else ():
        yield from properties(each)


def spellings(value: Any) -> Iterator[Any]:
    """Yields a value with its properties in all orders, and whole numbers as integers."""
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(some, value)))
    elif isinstance(value, dict):
        values = {key: some(each) for key, each in value.items()}
        for keys in itertools.permutations(value):
            for chosen in itertools.product(*(values[key] for key in keys)):
                yield dict(zip(keys, chosen, strict=True))
    else:
        yield value


def some(value: Any) -> list[Any]:
    return [*itertools.islice(spellings(value), MAX_SPELLINGS)]


class Checker:
    """Reads texts as a grammar's rows do: each token is looked up in the mask after those before it."""

    def __init__(self, model: str):
        tokenizer = load_tokenizer(model_path(model))
        self.eos = tokenizer.eos_ids[0]
        self.grammars = Grammars(tokenizer, tokenizer.vocab_size, [self.eos])
        self.encode = tokenizer.encode
        self.times: list[float] = []
        self.mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)

    def allows(self, asked: StructuredOutputsParams, value: Any) -> bool:
        matcher, text = self.grammars.matcher(asked), json.dumps(value, ensure_ascii=False)
        ids = [*self.encode(text, add_special_tokens=False), self.eos]
        for at, token in enumerate(ids):
            matcher.follow(np.array(ids[:at], np.int32))
            began = time.thread_time()
            matcher.allow(self.mask.view(np.int32), ())
            self.times.append(1e6 * (time.thread_time() - began))
            if matcher.error is not None:
                raise RuntimeError(matcher.error)
            if not self.mask[token // 32] >> np.uint32(token % 32) & 1:
                return False
        return True


def main(folder: str, every: int) -> None:
    checker, reasons, failures = Checker(MODEL), collections.Counter[str](), []
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(Path(folder).glob("*.json"))[::every]:
        given = json.loads(path.read_text(encoding="utf-8"))
        source = path.stem if isinstance(given, list) else re.split("[-_]", path.stem)[0]
        for group in given if isinstance(given, list) else [given]:
            c, orders = counts[source], [*properties(group["schema"])]
            c["schemas"] += 1
            try:
                asked = StructuredOutputsParams(json=group["schema"])
                checker.grammars.matcher(asked)
            except ValueError as error:
                c["refused"] += 1
                reasons[_reason(str(error))] += 1
                continue
            for test in group["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                forms = some(ordered(test["data"], orders))
                try:
                    right = any(checker.allows(asked, form) for form in forms) == test["valid"]
                except RuntimeError as error:
                    reasons[f"after it began: {error}"] += 1
                    right = False
                c[kind] += 1
                c[f"{kind}, right"] += right
                if not right:
                    what = "not allowed" if test["valid"] else "ALLOWED"
                    failures.append(f"{path.stem}: {group['description']}: {test.get('description', '')}: {what}")
    print("| file | schemas | refused | valid: allowed | invalid: refused |\n|---|---:|---:|---:|---:|")
    for source, c in {**counts, "all": sum(counts.values(), collections.Counter())}.items():
        print(_row(source, c))
    print("\nRefused:", *(f"{count} x {reason}" for reason, count in reasons.most_common()), sep="\n- ")
    print("\nFailures:", *failures, sep="\n- ")
    quantiles = np.quantile(checker.times, [0.5, 0.9, 0.99, 1])
    print(f"\n{len(checker.times):,} masks, us of CPU: median, 90 %, 99 %, most:", *(f"{q:.0f}" for q in quantiles))


def _row(name: str, c: collections.Counter[str]) -> str:
    pairs = (f"{c[f'{kind}, right']} of {c[kind]}" for kind in ("valid", "invalid"))
    return " | ".join([f"| {name}", f"{c['schemas']}", f"{c['refused']}", *pairs]) + " |"


def _reason(error: str) -> str:
    text = error.split("enforced: ")[-1].split("read: ")[-1]
    return re.sub(r"https?://\S+|'[^']*'$", "...", text)[:90]


if __name__ == "__main__":
    main(sys.argv[1], int((sys.argv[2:] or [1])[0]))
