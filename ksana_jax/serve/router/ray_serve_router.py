"""The router's policies inside a Ray Serve application of your own, by Serve's interface of request routers.

    serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="ksana_jax.serve.router.ray_serve_router:PolicyRouter",
        request_router_kwargs={"model": "ksana-tiny", "policy": "min_ttft", "block_size": 16}))

Serve shows a router the arguments of a call, so it can read the prompt of a deployment that is called with a request's
body. A deployment that takes HTTP requests itself is called with its headers alone (Ray 2.60), and is routed by load.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]

from ksana_jax.serve.router import NoServer, RoutedRequest, Router, RouterSettings, hashes_of
from ksana_jax.serve.router.proxy.prompts import PromptReader
from ksana_jax.tokenizers import load_tokenizer


class PolicyRouter(RequestRouter):
    """Sends a call to the replica that a policy of ours chooses, next to those that have room in Serve's own order."""

    def initialize_state(self, *, model: str, policy: Any = "min_ttft", seed: int = 0, **settings: Any) -> None:
        """Takes `request_router_kwargs`.

        Args:
          model: whose tokenizer and chat template make prompts. policy, seed: see `Router`.
          settings: see `RouterSettings`.

        Raises:
          ConfigError: a setting is invalid.
        """
        self._prompts = PromptReader(load_tokenizer(model))
        self._policies = Router((), policy, RouterSettings(**settings), seed)

    def update_replicas(self, replicas: list[Any]) -> None:
        """See `RequestRouter`."""
        super().update_replicas(replicas)
        ids = {replica.replica_id for replica in replicas}
        for gone in set(self._policies.servers) - ids:
            self._policies.remove(gone, time.monotonic())
        for new in ids - set(self._policies.servers):
            self._policies.add_server(new)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """See `RequestRouter`. Asked again for a call, it chooses among the candidates that are left."""
        here = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        now = time.monotonic()
        self._policies.finished(pending_request.metadata.internal_request_id, now)
        try:
            chosen = self._policies.choose(
                self._routed(pending_request), now, set(self._policies.servers) - here.keys()
            )
        except NoServer:
            return [candidate_replicas]
        rest = [replica for number, replica in here.items() if number != chosen]
        return [[here[chosen]], rest] if rest else [[here[chosen]]]

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        super().on_request_completed(replica_id, internal_request_id)
        self._policies.finished(internal_request_id, time.monotonic())

    def _routed(self, pending: Any) -> RoutedRequest:
        """Returns a call as the policies see it; without a prompt that can be read, as one of a single token."""
        number, ids = pending.metadata.internal_request_id, np.zeros(0, np.int32)
        body = next((one for one in (*pending.args, *pending.kwargs.values()) if isinstance(one, Mapping)), {})
        try:
            if isinstance(prompt := body.get("prompt"), str):
                ids = self._prompts.completion(prompt)
            elif "messages" in body and self._prompts.reads_chats:
                ids = self._prompts.chat(body)
            hashes = hashes_of(ids, self._policies.settings.block_size)
        except (ValueError, TypeError, LookupError):
            return RoutedRequest(number, 1)
        return RoutedRequest(number, max(len(ids), 1), hashes)
