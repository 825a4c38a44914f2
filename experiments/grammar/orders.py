"""Orders to extract from texts: six facts among sentences about other things, after two examples; and a schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs

FIELDS: dict[str, list[Any]] = {
    "customer": ["Mara Jansen", "Ravi Patel", "Lena Fischer", "Tom Baker", "Aiko Tanaka", "Omar Haddad", "Eva Novak"],
    "city": ["Lisbon", "Oslo", "Toronto", "Vienna", "Nairobi", "Lima", "Dublin", "Prague"],
    "item": ["lamps", "chairs", "clocks", "tents", "kettles", "mirrors", "ladders"],
    "quantity": [2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 20],
    "price": [25, 38, 47, 59, 64, 72, 83, 96, 110, 145],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"],
}
FACTS = (
    "The order was placed by {customer}.",
    "It must be sent to {city}.",
    "The shop sells {item} to this customer.",
    "The number of pieces is {quantity}.",
    "The price is {price} euros.",
    "The parcel leaves on {day}.",
)
OTHERS = (
    "The weather was mild and the streets were quiet.",
    "The clerk drank a cup of tea before noon.",
    "A new shelf was built next to the door.",
)
SENTENCE = "{customer} from {city} buys {quantity} {item} for {price} euros on {day}."
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"enum": values}
        if name in ("item", "day")
        else {"type": "string", "maxLength": 24}
        if isinstance(values[0], str)
        else {"type": "integer", "minimum": 1, "maximum": 999}
        for name, values in FIELDS.items()
    },
    "required": [*FIELDS],
    "additionalProperties": False,
}


def orders(count: int, seed: int) -> list[dict[str, Any]]:
    """Draws orders: {"facts": {field: value}, "json", "sentence": prompts that ask for the facts in that form}."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        # The examples' facts differ from the order's in every field.
        drawn = [rng.sample(values, 3) for values in FIELDS.values()]
        *examples, facts = (dict(zip(FIELDS, values, strict=True)) for values in zip(*drawn, strict=True))
        texts = []
        for each in (*examples, facts):
            sentences = [*(fact.format(**each) for fact in FACTS), *OTHERS]
            rng.shuffle(sentences)
            texts.append(" ".join(sentences))
        order: dict[str, Any] = {"facts": facts}
        for form, write in (("json", json.dumps), ("sentence", lambda each: SENTENCE.format(**each))):
            answers = [*(f" {write(each)}\n\n" for each in examples), ""]
            order[form] = "".join(f"Text: {t}\n{form.upper()}:{a}" for t, a in zip(texts, answers, strict=True))
        found.append(order)
    return found


def num_right(facts: dict[str, Any], answer: str) -> int:
    """Returns how many of the six facts an answer contains as whole words, whatever its form."""
    return sum(re.search(rf"\b{value}\b", answer) is not None for value in facts.values())


def is_valid(answer: str) -> bool:
    """Returns True if an answer is JSON of the schema, by a validator that grammars do not use."""
    try:
        return jsonschema_rs.is_valid(SCHEMA, json.loads(answer))
    except ValueError:
        return False
