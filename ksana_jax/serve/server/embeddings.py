"""POST /v1/embeddings: hidden states of prompts after the final norm, of the last token or their mean."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.pooling import UNSAMPLED, PoolingParams
from ksana_jax.serve.server.errors import json_response
from ksana_jax.serve.server.generation import submit
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.prompts import check_length, check_model, completion_prompts
from ksana_jax.serve.server.replies import head_of, reply
from ksana_jax.serve.server.request_models import EmbeddingRequest
from ksana_jax.serve.server.state import cache_salt, serving_of


async def create(request: Request) -> Response:
    """Answers a request for embeddings; see `request_models`."""
    serving = serving_of(request)
    model, llm = serving.model, serving.llm
    asked = await read_request(request, EmbeddingRequest)
    check_model(model, asked.model)
    pooling = PoolingParams(asked.pooling_type, asked.use_activation, asked.dimensions)
    try:
        pooling.check(llm.model_config.d_model)
    except ValueError as error:
        raise asked.refused(error) from None
    prompts = await completion_prompts(serving, asked)
    check_length(model, prompts, 0, "input")
    head = head_of(model, "embd", "list", asked)
    salt, adapter = cache_salt(request, asked.cache_salt), model.adapters.get(asked.model or "")
    given = {"request_id": head["id"], "salt": salt, "adapter": adapter, "pooling_type": pooling.pooling_type}
    streams = await submit(serving, prompts, UNSAMPLED, asked, **given)

    def answer(outputs: Sequence[RequestOutput]) -> Response:
        found = [pooling.embedding(output.pooled) for output in outputs]
        values: list[Any] = [embedding.tolist() for embedding in found]
        if asked.encoding_format == "base64":
            values = [base64.b64encode(embedding.astype("<f4").tobytes()).decode() for embedding in found]
        data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
        count, cached = sum(len(prompt.ids) for prompt in prompts), sum(one.num_cached_tokens for one in outputs)
        usage = {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}}
        made = {"pooling_type": pooling.pooling_type, "use_activation": pooling.use_activation}
        return json_response({**head, "data": data, "usage": usage, **made})

    return await reply(request, streams, answer)
