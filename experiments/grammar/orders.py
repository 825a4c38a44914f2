"""Orders to extract from texts: six facts among sentences about other things, after two examples; and a schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

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
    "The telephone rang twice, and no one answered it.",
    "Some boxes were moved to the cellar.",
    "The radio played an old song about the sea.",
    "A cat slept on the counter all afternoon.",
    "The windows were cleaned and the floor was swept.",
    "Two visitors asked for the way to the station.",
    "The printer ran out of paper and was filled again.",
)
SENTENCE = "{customer} from {city} buys {quantity} {item} for {price} euros on {day}."
NUM_EXAMPLES = 2
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


def orders(count: int, seed: int, num_others: int) -> list[dict[str, Any]]:
    """Draws orders: {"facts": {field: value}, "json", "sentence": prompts that ask for the facts in that form}.

    Args:
      num_others: sentences about other things in each text, of which there are ten; more repeat.
    """
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        # The examples' facts differ from the order's in every field.
        drawn = [rng.sample(values, NUM_EXAMPLES + 1) for values in FIELDS.values()]
        *examples, facts = (dict(zip(FIELDS, values, strict=True)) for values in zip(*drawn, strict=True))
        texts = [_text(rng, each, num_others) for each in (*examples, facts)]
        order = {"facts": facts}
        for form, write in (("json", json.dumps), ("sentence", lambda each: SENTENCE.format(**each))):
            answers = [f" {write(each)}\n\n" for each in examples]
            asked = (f"Text: {t}\n{form.upper()}:{a}" for t, a in zip(texts, [*answers, ""], strict=True))
            order[form] = "".join(asked)
        found.append(order)
    return found


def _text(rng: random.Random, facts: dict[str, Any], num_others: int) -> str:
    sentences = [fact.format(**facts) for fact in FACTS] + [OTHERS[i % len(OTHERS)] for i in range(num_others)]
    rng.shuffle(sentences)
    return " ".join(sentences)


def num_right(facts: dict[str, Any], answer: str) -> int:
    """Returns how many of the six facts an answer contains as whole words, whatever its form."""
    return sum(re.search(rf"\b{value}\b", answer) is not None for value in facts.values())


def is_valid(answer: str) -> bool:
    """Whether an answer is JSON with the schema's fields and types in any order; a check apart from any grammar."""
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    if not isinstance(found, dict) or found.keys() != FIELDS.keys():
        return False
    for name, given in SCHEMA["properties"].items():
        value = found[name]
        if "enum" in given:
            valid = value in given["enum"]
        elif given["type"] == "string":
            valid = isinstance(value, str) and len(value) <= given["maxLength"]
        else:
            valid = type(value) is int and given["minimum"] <= value <= given["maximum"]
        if not valid:
            return False
    return True
