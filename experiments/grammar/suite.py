"""Suites of JSON schemas with instances against the grammars of `structured_outputs`, token by token.

JSON Schema's own tests:
pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
python -m experiments.grammar.suite jsonschema-4.26.0/json/tests/draft2020-12

MaskBench (real schemas of JSONSchemaBench), every tenth file of github.com/guidance-ai/jsonschemabench at ba103c7:
python -m experiments.grammar.suite jsonschemabench/maskbench/data 10

A schema is refused with its reason before any token, or it is enforced: then a grammar allows each valid instance in
canonical form (properties in the schema's order, 1 for 1.0), and no invalid one.
"""

from __future__ import annotations

import collections
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


def canonical(value: Any, orders: list[list[str]]) -> Any:
    """Returns a value as outputs have it; orders: names of properties of each object of the schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [canonical(each, orders) for each in value]
    if isinstance(value, dict):
        names = max(orders, key=lambda names: (len(value.keys() & names), -len(names)), default=[])
        keys = sorted(value, key=lambda key: names.index(key) if key in names else len(names))
        return {key: canonical(value[key], orders) for key in keys}
    return value


def properties(schema: Any) -> Iterator[list[str]]:
    """Yields the names of the properties of each object in a schema, in their order."""
    if isinstance(schema, dict):
        if isinstance(found := schema.get("properties"), dict):
            yield [*found]
        schema = [*schema.values()]
    for each in schema if isinstance(schema, list) else ():
        yield from properties(each)


def allows(grammars: Grammars, asked: StructuredOutputsParams, ids: list[int], times: list[float]) -> bool:
    """Reads tokens as a grammar's rows do: each is looked up in the mask after those before it."""
    matcher, mask = grammars.matcher(asked), np.zeros(-(-grammars._vocab_size // 32), np.uint32)
    for at, token in enumerate(ids):
        matcher.follow(np.array(ids[:at], np.int32))
        began = time.thread_time()
        matcher.allow(mask.view(np.int32), ())
        times.append(1e6 * (time.thread_time() - began))
        if matcher.error is not None:
            raise RuntimeError(matcher.error)
        if not mask[token // 32] >> np.uint32(token % 32) & 1:
            return False
    return True


def main(folder: str, every: str = "1") -> None:
    tokenizer = load_tokenizer(model_path("smollm2"))
    grammars, eos = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids), tokenizer.eos_ids[0]
    reasons, failures, times = collections.Counter[str](), [], []
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(Path(folder).glob("*.json"))[:: int(every)]:
        given = json.loads(path.read_text(encoding="utf-8"))
        source = path.stem if isinstance(given, list) else re.split("[-_]", path.stem)[0]
        for group in given if isinstance(given, list) else [given]:
            c, orders = counts[source], [*properties(group["schema"])]
            c["schemas"] += 1
            try:
                asked = StructuredOutputsParams(json=group["schema"])
                grammars.matcher(asked)
            except ValueError as error:
                c["refused"] += 1
                reasons[re.sub(r"https?://\S+|.*(enforced|read): ", "", str(error))[:90]] += 1
                continue
            for test in group["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                text = json.dumps(canonical(test["data"], orders), ensure_ascii=False)
                try:
                    ids = [*tokenizer.encode(text, add_special_tokens=False), eos]
                    right = allows(grammars, asked, ids, times) == test["valid"]
                except RuntimeError as error:
                    reasons[f"after it began: {error}"] += 1
                    right = False
                c.update({kind: 1, f"{kind}, right": right})
                if not right:
                    failures.append(f"{kind}: {path.stem}: {group['description']}: {test.get('description', '')}")
    print("| file | schemas | refused | valid: allowed | invalid: refused |\n|---|---:|---:|---:|---:|")
    for source, c in {**counts, "all": sum(counts.values(), collections.Counter())}.items():
        right = " | ".join(f"{c[f'{kind}, right']} of {c[kind]}" for kind in ("valid", "invalid"))
        print(f"| {source} | {c['schemas']} | {c['refused']} | {right} |")
    print("\nRefused:", *(f"{count} x {reason}" for reason, count in reasons.most_common()), sep="\n- ")
    print("\nNot as they should be:", *failures, sep="\n- ")
    quantiles = [f"{q:.0f}" for q in np.quantile(times, [0.5, 0.9, 0.99, 1])]
    print(f"\n{len(times):,} masks, us of CPU: median, 90 %, 99 %, most:", *quantiles)


if __name__ == "__main__":
    main(*sys.argv[1:])
