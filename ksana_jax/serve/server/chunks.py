"""Writes the chunks of a stream. Knows deltas of completions and OpenAI's two formats, no HTTP.

The constant parts of a stream are formatted once: a chunk of text costs one pass over the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ksana_jax.core.outputs import CompletionOutput, RequestOutput
from ksana_jax.core.request import FinishReason
from ksana_jax.serve.server.answer_parts import AnswerParts, deltas_of
from ksana_jax.serve.server.generation import Usage, check_output
from ksana_jax.serve.server.logprobs import CompletionLogprobs, chat_logprobs
from ksana_jax.serve.server.model import TokenTexts
from ksana_jax.serve.server.sse import event


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Chunks:
    """Writes the events of one stream.

    Args:
      head: the fields of all chunks, such as id and model. opening: more fields, of the first chunk.
      choices: one writer for each choice, in their order.
      usage: of the whole request, so far.
      include_usage: whether the last chunk has it. in_each: whether every one has.
    """

    def __init__(
        self,
        head: dict[str, Any],
        choices: Sequence[TextChoice | ChatChoice],
        usage: Usage,
        include_usage: bool,
        in_each: bool,
        opening: dict[str, Any] | None = None,
    ):
        self._head, self._choices, self._usage = head, choices, usage
        self._include_usage, self._in_each = include_usage, in_each
        self._before, self._before_others = (
            f'data: {_json(fields)[:-1]},"choices":[{{"index":' for fields in ({**head, **(opening or {})}, head)
        )
        self._after = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
        self._newest: dict[int, RequestOutput] = {}

    def write(self, number: int, output: RequestOutput) -> str:
        """Returns the events for new output of the prompt with this number; empty if no text is complete.

        Raises:
          APIError: a completion was ended by a failure.
        """
        usage, pieces = self._usage, []
        self._newest[number] = output
        per_prompt = len(output.outputs)
        for new in output.outputs:
            choice = self._choices[number * per_prompt + new.index]
            if choice.ended or not (new.token_ids or new.finish_reason):
                continue
            check_output(new)
            usage.completion += len(new.token_ids)
            choice.ended = new.finish_reason is not None
            pieces += choice.write(new, output)
        if not pieces:
            return ""
        after = self._after
        if self._in_each:
            usage.note(self._newest.values())
            after = f'}}],"usage":{_json(usage.json())}}}\n\n'
        first, self._before = self._before, self._before_others
        return f"{first}{pieces[0]}{after}" + "".join(f"{self._before}{piece}{after}" for piece in pieces[1:])

    def last(self) -> str:
        """Returns the event with the usage, if it was asked for."""
        if not self._include_usage:
            return ""
        self._usage.note(self._newest.values())
        return event({**self._head, "choices": [], "usage": self._usage.json()})


class TextChoice:
    """Writes the chunks of one completion.

    Args:
      echo: text before the first one, with its log-probabilities if there are any.
      logprobs: None for none. token_ids: whether chunks have their token ids; the first chunk also has the prompt's.
    """

    def __init__(
        self, index: int, logprobs: CompletionLogprobs | None = None, echo: Echo | None = None, token_ids: bool = False
    ):
        self.ended = False
        self._token_ids, self._started = token_ids, False
        self._index, self._logprobs, self._echo = index, logprobs, echo

    def write(self, new: CompletionOutput, output: RequestOutput) -> list[str]:
        """Returns what follows `"choices":[{"index":` in each chunk."""
        text, reason = new.text, new.finish_reason
        arrays = None if self._logprobs is None else self._logprobs.write(new.token_ids, new.logprobs or ())
        if (echo := self._echo) is not None:
            text, arrays, self._echo = echo.text + text, echo.before(arrays, output), None
        if not text and reason is None and arrays is None and not self._token_ids:
            return []
        scores = "null" if arrays is None else _json(arrays)
        ends = "null" if reason is None else f'"{reason}"'
        ids = ""
        if self._token_ids:
            prompt = "null" if self._started else _json(output.prompt_token_ids)
            ids, self._started = f',"prompt_token_ids":{prompt},"token_ids":{_json(new.token_ids)}', True
        return [f'{self._index},"text":{quoted(text)},"logprobs":{scores},"finish_reason":{ends}{ids}']


class Echo:
    """The prompt as the first part of a completion.

    Args:
      logprobs: writes the prompt's; None for none.
    """

    def __init__(self, text: str, logprobs: CompletionLogprobs | None):
        self.text, self._logprobs = text, logprobs

    def before(self, arrays: dict[str, list] | None, output: RequestOutput) -> dict[str, list] | None:
        """Returns the arrays of prompt and completion."""
        if self._logprobs is None or arrays is None:
            return arrays
        own = self._logprobs.write(output.prompt_token_ids, output.prompt_logprobs or ())
        return {name: own[name] + arrays[name] for name in arrays}


def reason_of(one: CompletionOutput, calls: bool) -> str | None:
    """Returns the reason for which an answer ended. calls: whether it has tool calls."""
    return "tool_calls" if calls and one.finish_reason is FinishReason.STOP else one.finish_reason


class ChatChoice:
    """Writes the chunks of one answer: the role with the first token, text, and at the end the reason.

    Args:
      num_top: number of top tokens with log-probabilities at each place; None for no log-probabilities.
      token_ids: whether chunks have their token ids.
      parts: divides the answer; None if all of it is text.
    """

    def __init__(
        self,
        index: int,
        texts: TokenTexts,
        num_top: int | None,
        token_ids: bool = False,
        parts: AnswerParts | None = None,
    ):
        self.ended, self._token_ids, self._parts = False, token_ids, parts
        self._index, self._texts, self._num_top = index, texts, num_top
        self._started = False

    def write(self, new: CompletionOutput, output: RequestOutput) -> list[str]:
        """Returns what follows `"choices":[{"index":` in each chunk."""
        pieces = []
        if not self._started:
            self._started = True
            pieces.append(self._piece('{"role":"assistant","content":""}'))
        scores = "null"
        if self._num_top is not None and new.token_ids:
            scores = _json(chat_logprobs(self._texts, new.token_ids, new.logprobs or (), self._num_top))
        deltas, num_calls = [f'{{"content":{quoted(new.text)}}}'] if new.text else [], 0
        if self._parts is not None:
            num_before, found = self._parts.num_calls, self._parts.feed(new.text, new.finish_reason is not None)
            num_calls, deltas = self._parts.num_calls, [_json(delta) for delta in deltas_of(found, num_before)]
        if not deltas and (scores != "null" or (self._token_ids and new.token_ids)):
            deltas = ['{"content":""}']
        for delta in deltas:
            ids = f',"token_ids":{_json(new.token_ids)}' if self._token_ids else ""
            pieces.append(self._piece(delta, scores) + ids)
            scores, new.token_ids = "null", []
        if new.finish_reason is not None:
            pieces.append(self._piece("{}", "null", f'"{reason_of(new, bool(num_calls))}"'))
        return pieces

    def _piece(self, delta: str, scores: str = "null", ends: str = "null") -> str:
        return f'{self._index},"delta":{delta},"logprobs":{scores},"finish_reason":{ends}'
