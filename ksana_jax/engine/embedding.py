"""Embeddings: pooled hidden states of prompts, which share the steps of other requests."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from typing import Any

from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.pooling import UNSAMPLED, EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.progress import progress_bar
from ksana_jax.engine.prompts import Prompt, read_requests
from ksana_jax.tokenizers import Tokenizer


class Embeds:
    """The part of `LLM` that computes embeddings."""

    engine: Engine
    tokenizer: Tokenizer | None
    _serving: Any

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns embeddings of prompts, hidden states after the final norm; arguments and errors as of `generate`.

        Args:
          pooling_params: None takes the last token's, scaled to length 1.

        Raises:
          FloatingPointError: a prompt's scores are not finite.
        """
        pooling = pooling_params or PoolingParams()
        pooling.check(self.engine.model.d_model)
        asked = read_requests(prompts, UNSAMPLED, None, self.tokenizer, lora_request, streams=False)
        requests = self._serving.new_requests([one._replace(pooling_type=pooling.pooling_type) for one in asked])
        found = {}
        with progress_bar(requests) if use_tqdm else contextlib.nullcontext() as bar:
            for output in self._serving.serve(requests):
                if output.finished:
                    embedding = EmbeddingOutput(pooling.embedding(output.check().pooled).tolist())
                    facts = output.request_id, embedding, output.prompt_token_ids, output.num_cached_tokens
                    found[output.request_id] = EmbeddingRequestOutput(*facts)
                if bar is not None:
                    bar()
        return [found[request.request_id] for request in requests]
