"""Several models behind one address: the model of a request chooses the application that answers it.

Each model has the application of a server of its own; the door has the checks of keys and headers, and what concerns
all models. Requests without a body name their model in the query: GET /kv_events?model=NAME.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import display_name
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.model_memory import ModelMemoryManager, check_room, wake_first
from ksana_jax.serve.server import app, page
from ksana_jax.serve.server.auth import ADAPTER_PATHS
from ksana_jax.serve.server.errors import bad_request, json_response
from ksana_jax.serve.server.histogram import LoopLag
from ksana_jax.serve.server.json_body import BODY, receive_object
from ksana_jax.serve.server.prompts import unknown_model
from ksana_jax.serve.server.request_models import Named
from ksana_jax.serve.server.settings import ServerSettings
from ksana_jax.serve.server.state import Serving, serving_of
from ksana_jax.serve.server.validation import validate

_LOAD_ADAPTER, _UNLOAD_ADAPTER = ADAPTER_PATHS
# From the most important one.
_STATES = ("dead", "stalled", "draining", "loading")


class ServedModels:
    """The models of a server and their state, with the names of `Serving`.

    Args:
      names: of the models, as clients know them.
    """

    def __init__(self, names: Sequence[str], settings: ServerSettings):
        self.settings, self.lag = settings, LoopLag()
        self.apps = {name: _app(name, settings) for name in names}
        self._loading = ""
        self._progress = "loading"

    @property
    def models(self) -> list[Serving]:
        return [one.state.serving for one in self.apps.values()]

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self.models[0].in_thread(function, *args)

    def load(self, load: Callable[[str], AsyncLLM]) -> list[AsyncLLM]:
        """Loads all models, in the loading thread; under a budget each sleeps until all are loaded.

        Args:
          load: called with a model's name.

        Raises:
          ConfigError: the budget does not hold a model.
        """
        found, budget, level = [], self.settings.device_memory_bytes, self.settings.sleep_level
        for name in self.apps:
            self._loading, self.progress = name, "loading"
            found.append(load(name))
            if budget is not None:
                check_room([one.llm for one in found], budget, level)
                found[-1].llm.sleep(level)
        if budget is not None:
            wake_first([one.llm for one in found], budget, level)
        return found

    def begin(self, llms: Sequence[AsyncLLM]) -> None:
        """Begins to serve models that are loaded, in the order of the names; on the event loop."""
        budget = self.settings.device_memory_bytes
        model_memory = None if budget is None else ModelMemoryManager(budget)
        for serving, llm in zip(self.models, llms, strict=True):
            serving.lag, serving.model_memory = self.lag, model_memory
            serving.begin(llm)

    @property
    def progress(self) -> str:
        return f"{self._loading}: {self._progress}" if self._loading else self._progress

    @progress.setter
    def progress(self, progress: str) -> None:
        self._progress = progress

    @property
    def draining(self) -> bool:
        return any(serving.draining for serving in self.models)

    @draining.setter
    def draining(self, draining: bool) -> None:
        for serving in self.models:
            serving.draining = draining

    @property
    def status(self) -> str:
        """The worst status of a model."""
        found = {serving.status for serving in self.models}
        return next((state for state in _STATES if state in found), "ready")

    @property
    def names(self) -> list[str]:
        """The names of all models, and of their adapters once they are loaded."""
        if self.status == "loading":
            return [*self.apps]
        return [name for serving in self.models for name in (*serving.model.names, *serving.model.adapters)]

    def app_of(self, name: str | None) -> Starlette:
        """Returns the application of a model or an adapter.

        Raises:
          APIError: status 400 without a name; 404 if it is not served.
        """
        if name is None:
            raise bad_request(f"model is missing, must be one of {', '.join(self.names):.400}", "model")
        if (found := self.apps.get(name)) is not None:
            return found
        if name not in self.names:
            raise unknown_model(name, self.names)
        return next(one for one in self.apps.values() if name in one.state.serving.model.adapters)


def make_several_app(names: Sequence[str], settings: ServerSettings) -> Starlette:
    """Returns the application that serves several models, which are still loading; see `ServedModels`.

    Raises:
      ConfigError: settings are of one model, or two models have one name.
    """
    if settings.served_model_names or settings.lora_modules:
        option = "--served-model-name" if settings.served_model_names else "--lora-modules"
        raise ConfigError(f"{option} is of one model, {len(names)} are given")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two models have the name {twice!r:.120}, by which requests choose: rename a folder")
    several = ServedModels(names, settings)
    routes = [
        Route("/health", app.health),
        Route("/ready", app.ready),
        Route("/version", app.version),
        Route("/metrics", metrics),
        Route("/openapi.json", app.openapi),
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{name:path}", model),
        Route(page.PAGE_PATH, page.page),
    ]
    own, [first, *_] = {route.path for route in routes}, several.apps.values()
    for route in first.routes:
        assert isinstance(route, Route)
        if route.path not in own:
            routes.append(Route(route.path, _Door(several), methods=[*(route.methods or ())]))
    door = Starlette(routes=routes, middleware=app.guards(settings), exception_handlers={HTTPException: app.http_error})
    door.router.redirect_slashes = False
    door.state.serving = several
    return door


def names_of(models: Sequence[str]) -> list[str]:
    """Returns the names of models for clients: their own, or the last part of their paths.

    Raises:
      ConfigError: a model is given twice.
    """
    if twice := next((model for model in models if models.count(model) > 1), None):
        raise ConfigError(f"model {twice!r:.120} is given twice")
    return [display_name(model) or "ksana" for model in models]


def _app(name: str, settings: ServerSettings) -> Starlette:
    own = dataclasses.replace(settings, served_model_names=(name,), device_memory_bytes=None)
    return app.make_app(None, own, [Middleware(app.Errors)])


class _Door:
    """Passes requests of one path to the application of their model."""

    def __init__(self, several: ServedModels):
        self._several = several

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = await self._choose(Request(scope, receive))
        await chosen(scope, receive, send)

    async def _choose(self, request: Request) -> Starlette:
        """Returns the application of the model in the query or the body, which stays in the scope."""
        several, path = self._several, request.scope["path"]
        name = request.query_params.get("model")
        if request.method == "POST":
            body = request.scope[BODY] = await receive_object(request)
            adapter = body.value.get("lora_name")
            if path == _LOAD_ADAPTER and adapter in several.names:
                raise bad_request(f"lora_name {adapter!r:.80} is served already: unload it first, or give another")
            given = adapter if path == _UNLOAD_ADAPTER else body.value.get("model")
            if given is not None:
                name = validate(Named, {"model": given}).model
        return several.app_of(name)


async def models(request: Request) -> Response:
    """Answers with the names of all models, and their adapters."""
    several = serving_of(request)
    data = [
        app.described(serving, name)
        for serving in several.models
        for name in (*serving.model.names, *serving.model.adapters)
    ]
    return json_response({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """Answers with one model, or an adapter."""
    several: Any = serving_of(request)
    name = request.path_params["name"]
    return json_response(app.described(several.app_of(name).state.serving, name))


async def metrics(request: Request) -> Response:
    """Answers with the metrics of all models in Prometheus' format; each sample has the name of its model."""
    models = serving_of(request).models
    for serving in models:
        _ = serving.any_llm  # there are none during loading
    registry = CollectorRegistry()
    registry.register(_Merged([serving.metrics for serving in models]))
    return Response(generate_latest(registry), media_type=app.CONTENT_TYPE)


class _Merged(Collector):
    """The samples of several collectors, each metric once."""

    def __init__(self, parts: Collection[Collector]):
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for part in self._parts:
            for metric in part.collect():
                if (known := found.setdefault(metric.name, metric)) is not metric:
                    known.samples += metric.samples
        yield from found.values()
