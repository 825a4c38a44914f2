"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, as vLLM serves it.

lm-evaluation-harness takes them for a tokenizer of its own (`tokenizer_backend=remote`).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.serve.server.errors import bad_request, json_response
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.prompts import check_model, one_prompt
from ksana_jax.serve.server.request_models import DetokenizeRequest, TokenizeRequest
from ksana_jax.serve.server.state import serving_of


async def tokenize(request: Request) -> Response:
    """Answers with the token ids of a text or a conversation."""
    serving = serving_of(request)
    model = serving.model
    asked = await read_request(request, TokenizeRequest)
    check_model(model, asked.model)
    prompt = await one_prompt(serving, asked)

    def answer() -> Response:
        tokens = prompt.ids.tolist()
        names = [model.texts.name_of(token) for token in tokens] if asked.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": names}
        )

    return await serving.in_thread(answer)


async def detokenize(request: Request) -> Response:
    """Answers with the text of token ids, special tokens included."""
    serving = serving_of(request)
    model = serving.model
    asked = await read_request(request, DetokenizeRequest)
    check_model(model, asked.model)
    if model.tokenizer is None:
        raise bad_request(f"model {model.name} has no tokenizer")
    tokens = asked.tokens
    if tokens and max(tokens) >= model.vocab_size:
        raise bad_request(f"tokens has id {max(tokens):,}, ids go from 0 to {model.vocab_size - 1:,}", "tokens")
    return json_response({"prompt": await serving.in_thread(model.tokenizer.decode, tokens, False)})


async def tokenizer_info(request: Request) -> Response:
    """Answers with the tokenizer's special tokens and chat template."""
    model = serving_of(request).model
    if (tokenizer := model.tokenizer) is None:
        raise bad_request(f"model {model.name} has no tokenizer")
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": min(tokenizer.vocab_size, model.vocab_size),  # that a prompt may hold
            "model_max_length": model.max_model_len,
            "bos_token": tokenizer.bos_token or None,
            "bos_token_id": tokenizer.bos_id,
            "eos_token": tokenizer.eos_token or None,
            "eos_token_id": tokenizer.eos_id,
            "chat_template": tokenizer.chat_template,
        }
    )
