"""Requests as plain values: a replay's inputs, and their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.engine.completion import Request
from ksana_jax.lab.recording import Event
from ksana_jax.methods.steering import Steering


def plain_input(request: Request, asked: RequestInput) -> dict[str, Any]:
    """Returns a replay's input for a request."""
    default = SamplingParams()
    params = {field.name: getattr(request.params, field.name) for field in dataclasses.fields(default)}
    if (structured := request.params.structured_outputs) is not None:
        params["structured_outputs"] = dataclasses.asdict(structured)
    if request.params.steering is not None:
        params["steering"] = request.params.steering.plain()
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids.tolist(),
        "params": {name: value for name, value in params.items() if value != getattr(default, name)},
        "seeds": [completion.seq.seed for completion in request.completions],
        "cache_salt": asked.cache_salt,
        "num_question": asked.num_question,
        "streams": asked.streams,
        "arrival_s": request.metrics.arrival_s,
        **({} if asked.lora_request is None else {"lora_request": dataclasses.asdict(asked.lora_request)}),
    }


def read_input(given: Mapping[str, Any]) -> RequestInput:
    """Returns the input of `plain_input`.

    Raises:
      ConfigError: it has other values.
    """
    try:
        params = given["params"]
        if (bias := params.get("logit_bias")) is not None:
            params = params | {"logit_bias": {int(token): x for token, x in bias.items()}}  # keys of JSON are strings
        if (steering := params.get("steering")) is not None:
            parts = {name: {int(layer): x for layer, x in part.items()} for name, part in steering.items()}
            params = params | {"steering": Steering(**parts)}
        return RequestInput(
            np.array(given["prompt_token_ids"], np.int32),
            SamplingParams(**params),
            None,
            given["cache_salt"],
            given["request_id"],
            given["streams"],
            given["num_question"],
            None if (adapter := given.get("lora_request")) is None else LoRARequest(**adapter),
        )
    except (TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"request {given['request_id']!r:.80} cannot be replayed: {error}") from None


def plain_request(request: Request) -> Event:
    """Returns the times and counts of a request as an event."""
    reasons = [c.seq.finish_reason for c in request.completions]
    return {
        "event": "request",
        "request_id": request.request_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "finish_reasons": [None if reason is None else reason.value for reason in reasons],
        **dataclasses.asdict(request.metrics),
    }
