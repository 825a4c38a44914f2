"""Targets of `ksana bench serving`: a server with OpenAI's completions, or an engine in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.serving_load import Arriving, RequestFailed
from ksana_jax.serve.workload.items import WorkItem

if TYPE_CHECKING:
    import aiohttp

    from ksana_jax.engine.async_llm import AsyncLLM


class TargetModel(NamedTuple):
    """A target's model: its name, its number of token ids, and the maximum tokens of a prompt and its
    answer; None for unreported values."""

    model: str
    vocab_size: int | None
    max_model_len: int | None


class HTTPTarget:
    """A server; requests are streamed completions of token ids, which end after as many tokens as the workload says.

    Args:
      url: where it listens, without /v1. api_key: None sends none.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self.model = ""

    async def open(self, model: str | None) -> TargetModel:
        """Connects; returns the server's model.

        Args:
          model: None takes the first of its models.

        Raises:
          ConfigError: it cannot be reached, refuses the key, or has no such model.
        """
        aiohttp = _aiohttp()
        # uvicorn closes connections that were idle for 5 s; a request sent on one at that moment would fail.
        limits = {"limit": 0, "ttl_dns_cache": 3600, "keepalive_timeout": 2.5}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(**limits),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers=self._headers,
        )
        served = (await self._get("/v1/models"))["data"]
        names = [entry["id"] for entry in served]
        if model is not None and model not in names:
            raise ConfigError(f"{self.url} has no model {model!r}, it serves {', '.join(names)}")
        self.model = names[0] if model is None else model
        entry = served[names.index(self.model)]
        try:
            vocab_size = (await self._get("/tokenizer_info")).get("vocab_size")
        except ConfigError:  # other servers may not have it
            vocab_size = None
        return TargetModel(self.model, vocab_size, entry.get("max_model_len"))

    async def _get(self, path: str) -> dict[str, Any]:
        assert self._session is not None
        aiohttp = _aiohttp()
        try:
            async with self._session.get(self.url + path) as response:
                text = await response.text()
                if response.status != 200:
                    raise ConfigError(f"GET {self.url}{path}: {_named(response.status, text)}")
                return json.loads(text)
        except (aiohttp.ClientError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"GET {self.url}{path}: {str(error) or type(error).__name__}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def prepare(self, item: WorkItem) -> bytes:
        """Returns the body of a request."""
        return json.dumps(
            {
                "model": self.model,
                "prompt": item.tokens().tolist(),
                "max_tokens": item.num_output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def send(self, prepared: bytes, arriving: Arriving) -> None:
        """Posts a request and reads its events; see `Target.send`."""
        assert self._session is not None
        aiohttp = _aiohttp()
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", data=prepared, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise RequestFailed(_named(response.status, await response.text()))
                await self._read(response.content.iter_any(), arriving)
        except aiohttp.ClientError as error:
            raise RequestFailed(f"connection: {type(error).__name__}") from error

    async def _read(self, pieces: AsyncIterator[bytes], arriving: Arriving) -> None:
        async for event in events(pieces):
            if event == "[DONE]":
                return
            found = json.loads(event)
            if "error" in found:
                raise RequestFailed(f"error in the stream: {_name_of(found)}")
            if found.get("choices") and found["choices"][0].get("text"):
                arriving.piece()
            if usage := found.get("usage"):
                # Pieces may have several tokens; the server has counted them.
                arriving.num_output = usage["completion_tokens"]
                arriving.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        raise RequestFailed("the stream ended without [DONE]")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yields the data of server-sent events from a stream that may be cut anywhere."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _named(status: int, text: str) -> str:
    try:
        return f"HTTP {status} {_name_of(json.loads(text))}".strip()
    except ValueError:
        return f"HTTP {status}"


def _name_of(body: Any) -> str:
    """Returns the code or type of OpenAI's error format."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return str(error.get("code") or error.get("type") or "") if isinstance(error, Mapping) else ""


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise ImportError("ksana bench serving --url needs aiohttp: pip install 'ksana-jax[server]'") from error
    return aiohttp


class EngineTarget:
    """An engine in this process. Sender and engine share its processor time and Python's lock."""

    def __init__(self, llm: AsyncLLM, detokenize: bool):
        self._llm, self._detokenize = llm, detokenize

    def prepare(self, item: WorkItem) -> Any:
        """Returns prompt and parameters."""
        from ksana_jax.core.request import SamplingParams

        return {"prompt_token_ids": item.tokens()}, SamplingParams(
            temperature=0, max_tokens=item.num_output, ignore_eos=True, detokenize=self._detokenize
        )

    async def send(self, prepared: Any, arriving: Arriving) -> None:
        """Submits a request and reads its output; see `Target.send`."""
        prompt, params = prepared
        try:
            async with await self._llm.submit(prompt, params, delta=True) as stream:
                async for output in stream:
                    completion = output.outputs[0]
                    if completion.token_ids:
                        arriving.piece(len(completion.token_ids))
                    arriving.num_cached = output.num_cached_tokens
                    if completion.finish_reason is not None and completion.finish_reason not in ("stop", "length"):
                        raise RequestFailed(f"{completion.finish_reason}: {completion.error or 'no reason given'}")
        except (ValueError, RuntimeError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
