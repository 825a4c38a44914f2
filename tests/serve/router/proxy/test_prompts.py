"""Token ids of prompts equal the tokenizer's, whatever texts are cached."""

import pytest

from ksana_jax.serve.router.proxy.prompts import MIN_CACHED_CHARS, PromptReader
from ksana_jax.tokenizers import Tokenizer, render_chat
from ksana_jax.tokenizers.base import Piece

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>{% endfor %}<s>assistant\n"


class Pairs(Tokenizer):
    """One token for two characters, so that where a text is cut matters; <s> and <e> are special."""

    source, vocab_size, chat_template = "pairs", 2**16, TEMPLATE
    crosses = False  # whether tokens reach over special ones

    def __init__(self):
        self.num_encoded = 0

    def piece(self, token_id: int) -> Piece:
        return Piece([b"<s>", b"<e>"][token_id], special=True) if token_id < 2 else Piece(b"")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.num_encoded += len(text)
        if self.crosses:
            return [sum(map(ord, text[at : at + 2])) for at in range(0, len(text), 2)]
        ids: list[int] = []
        while text:
            size = 3 if text[:3] in ("<s>", "<e>") else 2 if text[1:4] not in ("<s>", "<e>") else 1
            ids.append({"<s>": 0, "<e>": 1}.get(text[:size]) or sum(map(ord, text[:size])) + 2)
            text = text[size:]
        return ids


@pytest.mark.parametrize("crosses", [False, True])
def test_ids_of_conversations_are_those_of_the_tokenizer_and_long_texts_are_tokenized_once(crosses):
    tokenizer = Pairs()
    tokenizer.crosses = crosses
    reader = PromptReader(tokenizer)
    messages = [{"role": "system", "content": "be brief. " * MIN_CACHED_CHARS}]
    costs = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn}"})
        expected = tokenizer.encode(render_chat(tokenizer, messages), add_special_tokens=False)
        tokenizer.num_encoded = 0
        assert reader.chat({"messages": messages}).tolist() == expected
        costs.append(tokenizer.num_encoded)
    assert costs[0] > 10 * MIN_CACHED_CHARS
    assert all(cost < MIN_CACHED_CHARS for cost in costs[1:]) != crosses


def test_fields_that_change_a_prompt_are_read():
    reader = PromptReader(tokenizer := Pairs())
    tokenizer.chat_template = TEMPLATE + "{{ a }}{{ tools }}"
    given = {"tools": [{"name": "f"}], "chat_template_kwargs": {"a": "b"}, "add_generation_prompt": None}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = reader.chat({"messages": [{"role": "user", "content": parts}], "temperature": 1} | given)
    said = "<s>user\none\ntwo<e><s>assistant\nb[{'name': 'f'}]"
    assert found.tolist() == tokenizer.encode(said, add_special_tokens=False)
