"""Facts that answers give as JSON, as JSON under a grammar and as a sentence, after the same compression.

An order of `orders` is requested in each form, with two examples of it; the whole prompt is compressed. A fact is
right if the answer contains it as a whole word, so that forms compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from experiments.grammar.orders import FIELDS, SCHEMA, is_valid, num_right, orders
from ksana_jax.lab.runs.tasks.base import BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, percent

FORMS = {"json": "JSON", "grammar": "JSON with a grammar", "sentence": "sentences"}


@dataclasses.dataclass
class OrdersSettings:
    """Fields of `settings` in the YAML file: num_orders, each requested in each form."""

    num_orders: int = int_field(32)


class Orders(BaseTask):
    """The task of this study. See the module's docstring."""

    Settings = OrdersSettings
    samples = "orders"
    measures_speed = False

    def num_samples(self, config: Mapping[str, Any]) -> int:
        return OrdersSettings(**config["settings"]).num_orders

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        from ksana_jax import SamplingParams, StructuredOutputsParams

        requests, drawn = [], orders(self.num_samples(trial.config), trial.seed)
        for form in FORMS:
            grammar = StructuredOutputsParams(json=SCHEMA) if form == "grammar" else None
            given: dict[str, Any] = {"structured_outputs": grammar, "stop": None if grammar else ["\n"]}
            params = SamplingParams(temperature=0, max_tokens=80, **given)
            for place, order in enumerate(drawn):
                requests.append((form, place, order, order["json" if form == "grammar" else form], params))
        *_, prompts, asked = zip(*requests, strict=True)
        outputs = trial.llm.generate(list(prompts), list(asked))
        for (form, place, order, *_), output in zip(requests, outputs, strict=True):
            answer = output.check().outputs[0]
            right = num_right(order["facts"], answer.text) / len(FIELDS)
            of_answer = {"right": right, "valid": is_valid(answer.text), "num_tokens": len(answer.token_ids)}
            yield {"metric": "answer", "form": form, "order": place, **of_answer, "text": answer.text}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes by form the shares of right facts, right_FORM, and of valid JSON, valid_FORM."""
        parts = self.parts(measurements).items()
        return {key: sum(part.value for part in found.values()) / len(found) for key, found in parts}

    def parts(self, measurements: Sequence[Measurement]) -> dict[str, dict[Hashable, Part]]:
        """Returns the shares of each order."""
        found: dict[str, dict[Hashable, Part]] = {}
        for m in (m for m in measurements if m["metric"] == "answer"):
            for key in ("right", "valid"):
                found.setdefault(f"{key}_{m['form']}", {})[m["order"]] = Part(float(m[key]))
        return found

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        valid = [Column(f"valid_{form}", f"valid, {FORMS[form]}, %", percent(0)) for form in ("json", "grammar")]
        right = [Column(f"right_{form}", f"right, {name}, %", percent(), "max") for form, name in FORMS.items()]
        return [*valid, *right]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return ["Right: of six facts, as words of the answer. Valid: JSON that fits the schema."]
