"""Facts that answers give as JSON, as JSON under a grammar and as a sentence, after the same compression.

An order of `orders` is asked for in each form, with two examples of it; all of the prompt is compressed. A fact is right
if the answer contains it as a whole word, so that forms compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from experiments.grammar.orders import FIELDS, SCHEMA, is_valid, num_right, orders
from ksana_jax.lab.runs.asking import run_warm
from ksana_jax.lab.runs.tasks.base import BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, number, of_metric, percent

FORMS = {"json": "JSON", "grammar": "JSON with a grammar", "sentence": "sentences"}


@dataclasses.dataclass
class OrdersSettings:
    """Fields of `settings` in the YAML file.

    num_orders: asked in each form. num_others: sentences about other things in each text.
    output_tokens: maximum tokens of an answer.
    """

    num_orders: int = int_field(32)
    num_others: int = int_field(3, least=0)
    output_tokens: int = int_field(80)


class Orders(BaseTask):
    """The task of this study. See the module's docstring."""

    Settings = OrdersSettings
    samples = "orders"
    measures_speed = False

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = OrdersSettings(**config["settings"])
        return settings.num_orders * len(FORMS) * (350 + settings.output_tokens)

    def num_samples(self, config: Mapping[str, Any]) -> int:
        return OrdersSettings(**config["settings"]).num_orders

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        from ksana_jax import SamplingParams, StructuredOutputsParams

        settings, llm = OrdersSettings(**trial.config["settings"]), trial.llm
        drawn = orders(settings.num_orders, trial.seed, settings.num_others)
        structured = StructuredOutputsParams(json=SCHEMA)
        for done, form in enumerate(FORMS, start=1):
            prompts = [order["json" if form == "grammar" else form] for order in drawn]
            given: dict[str, Any] = {"structured_outputs": structured} if form == "grammar" else {"stop": ["\n"]}
            params = SamplingParams(temperature=0, max_tokens=settings.output_tokens, **given)
            llm.generate(prompts[:1], params)  # compiles the form's programs
            outputs, seconds, _ = run_warm(llm, lambda: llm.generate(prompts, params))
            for place, (order, output) in enumerate(zip(drawn, outputs, strict=True)):
                text = output.check().outputs[0].text
                right, valid = num_right(order["facts"], text) / len(FIELDS), is_valid(text)
                yield {"metric": "answer", "form": form, "order": place, "right": right, "valid": valid, "text": text}
            count = sum(len(output.outputs[0].token_ids) for output in outputs)
            yield {"metric": "speed", "form": form, "num_output_tokens": count, "seconds": seconds}
            trial.progress(done / len(FORMS))

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes by form the share of right facts, right_FORM, of valid JSON, valid_FORM, and tokens_per_s_FORM."""
        found: dict[str, float] = {}
        for speed in (m for m in measurements if m["metric"] == "speed"):
            form, answers = speed["form"], [m for m in measurements if m["metric"] == "answer"]
            for key in ("right", "valid"):
                values = [float(m[key]) for m in answers if m["form"] == form]
                found[f"{key}_{form}"] = sum(values) / len(values)
            found[f"tokens_per_s_{form}"] = speed["num_output_tokens"] / speed["seconds"]
        return found

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
        return [*valid, *right, *(Column(f"tokens_per_s_{form}", f"tokens/s, {FORMS[form]}", number(0)) for form in FORMS)]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        count = len({m["order"] for m in of_metric(rows, "answer")})
        return [f"{count} orders of six facts. Right: of the facts, as words of the answer. Valid: parses and fits the schema."]
