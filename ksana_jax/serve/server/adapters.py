"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: adapters served as models, for the owner.

The owner names a folder of the server's machine. Requests that run with an adapter that is unloaded end with it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ksana_jax.core.lora import LoRARequest
from ksana_jax.serve.server.auth import ADAPTER_PATHS
from ksana_jax.serve.server.errors import APIError, bad_request, json_response
from ksana_jax.serve.server.fields import LOAD_ADAPTER, UNLOAD_ADAPTER, Fields, read_fields
from ksana_jax.serve.server.json_body import read_object
from ksana_jax.serve.server.state import Serving, serving_of


def routes() -> list[Route]:
    return [Route(path, act, methods=["POST"]) for path, act in zip(ADAPTER_PATHS, (load, unload), strict=True)]


async def load(request: Request) -> Response:
    """Reads an adapter and serves it as a model; answers with its name."""
    serving, values = await _read(request, LOAD_ADAPTER)
    model, name = serving.model, values["lora_name"]
    if not name.isprintable():
        raise bad_request(f"lora_name is {name!r:.80}, must be printable characters", "lora_name")
    try:
        adapter = LoRARequest(name, len(model.adapters) + 1, values["lora_path"])
        async with serving.any_llm.awake():
            await asyncio.to_thread(serving.any_llm.engine.factory.adapter_of, adapter)
    except ValueError as error:
        raise bad_request(str(error), "lora_path") from None
    if name in (*model.names, *model.adapters):
        raise bad_request(f"lora_name {name!r:.80} is served already: unload it first, or give another", "lora_name")
    model.adapters[name] = adapter
    return json_response({"lora_name": name, "loaded": True})


async def unload(request: Request) -> Response:
    """Ends an adapter's name; answers with it."""
    serving, values = await _read(request, UNLOAD_ADAPTER)
    name = values["lora_name"]
    if serving.model.adapters.pop(name, None) is None:
        served = ", ".join(serving.model.adapters) or "none"
        raise APIError(404, f"adapter {name!r:.80} does not exist; served: {served:.400}", code="model_not_found")
    return json_response({"lora_name": name, "loaded": False})


async def _read(request: Request, fields: Fields) -> tuple[Serving, dict[str, Any]]:
    serving = serving_of(request)
    read = partial(read_fields, fields=fields)
    return serving, await read_object(request, serving.settings, serving.in_thread, read)
