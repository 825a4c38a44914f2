"""POST /sessions/NAME/save and /restore: the prefix cache of a conversation, in the server's folder, for its owner.

A client's prefixes have the salt of its key, so the owner, whose key is another, names the client's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ksana_jax.engine.llm import LLM
from ksana_jax.engine.session_files import SessionError, remove_unfinished
from ksana_jax.serve.server.auth import SESSION_PATHS, salt_of_key
from ksana_jax.serve.server.errors import bad_request, json_response
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.prompts import check_model, one_prompt
from ksana_jax.serve.server.request_models import SaveRequest
from ksana_jax.serve.server.state import Serving, cache_salt, serving_of
from ksana_jax.serve.server.validation import Body

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def routes(folder: str) -> list[Route]:
    remove_unfinished(Path(folder))
    return [
        Route(SESSION_PATHS + "{name}/save", save, methods=["POST"]),
        Route(SESSION_PATHS + "{name}/restore", restore, methods=["POST"]),
    ]


async def save(request: Request) -> Response:
    """Saves what is cached of a text or a conversation; answers with its name and number of tokens."""
    serving, name, folder = serving_of(request), *_place(request)
    asked = await read_request(request, SaveRequest)
    check_model(serving.model, asked.model)
    request.scope["ksana.salt"] = _salt(serving.settings.api_keys, asked.api_key)
    prompt, salt = await one_prompt(serving, asked), cache_salt(request, asked.cache_salt)
    if (adapter := serving.model.adapters.get(asked.model or "")) is not None:
        salt = await _salted(serving, adapter, salt)
    text = RequestOutput(
        name,
        prompt.text,
        prompt.ids.tolist(),
        [CompletionOutput(0, "", [])],
        finished=True,
        metrics=RequestMetrics(0.0),
        cache_salt=salt,
    )
    return await _answered(request, name, lambda llm: llm.save_session(text, folder))


async def restore(request: Request) -> Response:
    """Restores a session for the client whose it was; answers with its name and number of tokens."""
    name, folder = _place(request)
    await read_request(request, Body)
    return await _answered(request, name, lambda llm: llm.restore_session(folder))


def _place(request: Request) -> tuple[str, Path]:
    """Returns the name of a session, and its folder."""
    name, folder = request.path_params["name"], serving_of(request).settings.session_dir
    if not _NAME.fullmatch(name):
        raise bad_request(f"session {name!r:.140} must be 1 to 128 letters, digits, '.', '_' and '-'", "name")
    assert folder is not None, "there are no routes without it"
    return name, Path(folder) / name


def _salt(keys: tuple[str, ...], given: str | None) -> str:
    if not keys and given is None:
        return ""
    if given not in keys:
        raise bad_request("api_key must be the key of a client: each key has a prefix cache of its own", "api_key")
    return salt_of_key(given.encode())


async def _salted(serving: Serving, adapter: LoRARequest, salt: str) -> str:
    """Returns the salt under which an adapter's prefixes are cached; raises APIError if it cannot be read."""
    try:
        async with serving.any_llm.awake():
            use = await asyncio.to_thread(serving.any_llm.engine.factory.adapter_of, adapter)
    except ValueError as error:
        raise bad_request(str(error), "model") from None
    return use.salted(salt)


async def _answered(request: Request, name: str, act: Callable[[LLM], int]) -> Response:
    served = serving_of(request).llm
    if (llm := served.llm) is None:
        raise bad_request("this engine was not made by LLM: it has no sessions")
    try:
        async with served.awake():
            return json_response({"name": name, "num_tokens": await asyncio.to_thread(act, llm)})
    except SessionError as error:
        raise bad_request(str(error), "name") from None
