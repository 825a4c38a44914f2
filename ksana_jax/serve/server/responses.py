"""POST /v1/responses: answers conversations in the form of OpenAI's Responses API. A chat makes the answer."""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import FinishReason
from ksana_jax.serve.server.answer_parts import AnswerParts, Part, Text
from ksana_jax.serve.server.chat import Chat, begin
from ksana_jax.serve.server.errors import APIError, json_response
from ksana_jax.serve.server.generation import Usage, check_output
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.replies import reply
from ksana_jax.serve.server.responses_models import ResponsesRequest, renamed
from ksana_jax.serve.server.token_stream import TokenStream


async def create(request: Request) -> Response:
    """Answers a request for a response; see `responses_models`."""
    asked = await read_request(request, ResponsesRequest)
    try:
        chat = await begin(request, asked.chat(), "resp", "response")
    except APIError as error:
        raise renamed(error) from None
    answer = ResponseEvents(asked, chat)
    if asked.stream:
        return TokenStream(chat.streams, answer.write, answer.last, chat.serving.settings.ping_s)

    def whole(outputs: list[RequestOutput]) -> Response:
        answer.write(0, outputs[0])
        return json_response(answer.json())

    return await reply(request, chat.streams, whole)


class ResponseEvents:
    """Writes the events of an answer; its items are those of the whole answer in the end."""

    def __init__(self, asked: ResponsesRequest, chat: Chat):
        self._echoed, self._head = asked.echoed(), chat.head
        self._parts = chat.form.parts() or AnswerParts(None)
        self._usage, self._status, self._events = Usage(len(chat.prompt.ids)), "in_progress", []
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None  # kind of the text that the last item is

    def json(self) -> dict[str, Any]:
        """Returns the answer so far."""
        usage = None
        if self._status != "in_progress":
            counts = self._usage
            usage = {
                "input_tokens": counts.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached, **counts.reach},
                "output_tokens": counts.completion,
                "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
                "total_tokens": counts.prompt + counts.completion,
            }
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": self._status,
            "output": self._items,
            "usage": usage,
            "error": None,
            "incomplete_details": cut,
            **self._echoed,
        }

    def write(self, number: int, output: RequestOutput) -> str:
        """Returns the events for new output.

        Raises:
          APIError: the answer was ended by a failure.
        """
        [new] = output.outputs
        check_output(new)
        if not self._usage.completion:
            self._add("response.created", response=self.json())
        self._usage.completion += len(new.token_ids)
        self._usage.note([output])
        ended = new.finish_reason is not None
        for part in self._parts.feed(new.text, ended):
            self._part(part)
        if ended:
            self._close()
            self._status = "incomplete" if new.finish_reason is FinishReason.LENGTH else "completed"
            self._add(f"response.{self._status}", response=self.json())
        found, self._events = "".join(self._events), []
        return found

    def last(self) -> str:
        return ""

    def _part(self, part: Part) -> None:
        if isinstance(part, Text):
            if self._open != part.kind:
                self._close()
                self._begin(part.kind)
            self._items[-1]["content"][0]["text"] += part.text
            more = {"logprobs": []} if part.kind == "content" else {}
            self._of_text("delta", delta=part.text, **more)
            return
        self._close()
        item = self._item("function_call", "fc", call_id=secrets.token_hex(5)[:9], name=part.name, arguments="")
        about = {"item_id": item["id"], "output_index": len(self._items) - 1}
        self._add("response.function_call_arguments.delta", delta=part.arguments, **about)
        item["arguments"], item["status"] = part.arguments, "completed"
        self._add("response.function_call_arguments.done", arguments=part.arguments, name=part.name, **about)
        self._add("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item(self, kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
        item = {"type": kind, "id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress", **fields}
        self._items.append(item)
        self._add("response.output_item.added", output_index=len(self._items) - 1, item=item)
        return item

    def _begin(self, kind: str) -> None:
        """Begins an item of text."""
        self._open = kind
        if kind == "content":
            item = self._item("message", "msg", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": []}
        else:
            item, part = self._item("reasoning", "rs", summary=[], content=[]), {"type": "reasoning_text", "text": ""}
        place = {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}
        self._add("response.content_part.added", part=part, **place)
        item["content"].append(part)

    def _of_text(self, what: str, **fields: Any) -> None:
        kind = "output_text" if self._open == "content" else "reasoning_text"
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        self._add(f"response.{kind}.{what}", **place, **fields)

    def _close(self) -> None:
        """Ends the item of text that is open, if one is."""
        if self._open is None:
            return
        item, index = self._items[-1], len(self._items) - 1
        [part] = item["content"]
        self._of_text("done", text=part["text"], **({"logprobs": []} if self._open == "content" else {}))
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._add("response.content_part.done", part=part, **place)
        item["status"], self._open = "completed", None
        self._add("response.output_item.done", output_index=index, item=item)

    _number = 0

    def _add(self, kind: str, **fields: Any) -> None:
        """Adds an event as it is now: items change later."""
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._events.append(f"event: {kind}\ndata: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n")
