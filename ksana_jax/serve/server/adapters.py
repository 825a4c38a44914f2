"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: adapters served as models, for the owner.

The owner names a folder of the server's machine. Requests that run with an adapter that is unloaded end with it.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ksana_jax.core.lora import LoRARequest
from ksana_jax.serve.server.auth import ADAPTER_PATHS
from ksana_jax.serve.server.errors import APIError, bad_request, json_response
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.request_models import LoadRequest, UnloadRequest
from ksana_jax.serve.server.state import serving_of


def routes() -> list[Route]:
    return [Route(path, act, methods=["POST"]) for path, act in zip(ADAPTER_PATHS, (load, unload), strict=True)]


async def load(request: Request) -> Response:
    """Reads an adapter and serves it as a model; answers with its name."""
    serving, asked = serving_of(request), await read_request(request, LoadRequest)
    model, name = serving.model, asked.lora_name
    if not name.isprintable():
        raise bad_request(f"lora_name is {name!r:.80}, must be printable characters", "lora_name")
    try:
        adapter = LoRARequest(name, len(model.adapters) + 1, asked.lora_path)
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
    serving, name = serving_of(request), (await read_request(request, UnloadRequest)).lora_name
    if serving.model.adapters.pop(name, None) is None:
        served = ", ".join(serving.model.adapters) or "none"
        raise APIError(404, f"adapter {name!r:.80} does not exist; served: {served:.400}", code="model_not_found")
    return json_response({"lora_name": name, "loaded": False})
