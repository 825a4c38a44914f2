"""`ksana route`: one address for several servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ksana_jax.cli import groups, serving
from ksana_jax.cli.fields import read_setting, takes_fields
from ksana_jax.serve.router.proxy.settings import ProxySettings, read_server
from ksana_jax.serve.server.settings import read_api_keys

DEFAULT_BLOCK_SIZE = 16


@takes_fields(
    ProxySettings,
    "policy prefix_file index host port allowed_hosts tokenizer num_queued=router_queue queue_timeout_s=queue_timeout "
    "max_requests_per_server max_retries probe_s=probe_interval shutdown_timeout_s=shutdown_timeout "
    "client_timeout_s=client_timeout max_connections seed",
)
def route(
    model: Annotated[
        str | None, typer.Argument(help="with --spawn: the model that servers serve", show_default=False)
    ] = None,
    engine_settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTINGS",
            help="with --spawn: settings of the engines and options of ksana serve",
            show_default=False,
        ),
    ] = None,
    servers: Annotated[
        str | None, typer.Option(help="addresses of running servers, separated by commas", show_default=False)
    ] = None,
    spawn: Annotated[
        str,
        typer.Option(help="servers that Ray Serve starts, and starts again when they end: a number, or a range: 1-4"),
    ] = "0",
    ray_address: Annotated[str, typer.Option(help="with --spawn: HOST:PORT, auto or local")] = "auto",
    ray_resources: Annotated[
        str | None,
        typer.Option(help="each server's: '{num_cpus: 4, num_gpus: 1}'", show_default="1 CPU", metavar="YAML"),
    ] = None,
    *,
    options: dict[str, Any],
    api_key_file: serving.Keys = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(help="keys for /servers, which drains", show_default="only from this machine"),
    ] = None,
    server_api_key_file: Annotated[
        Path | None, typer.Option(help="the key for running servers", show_default="the client's own is passed on")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="tokens in a block of the servers' prefix caches",
            show_default=f"block_size of the settings, or {DEFAULT_BLOCK_SIZE}",
        ),
    ] = None,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="rate of a server; it is corrected as measured")] = 8000.0,
    pool_tokens: Annotated[
        int | None, typer.Option(help="tokens that fit the KV pool of a server", show_default="no limit")
    ] = None,
    cache_ttl: Annotated[float, typer.Option(help="seconds for which what was sent is expected to be cached")] = 120.0,
) -> None:
    """Sends each request to the server expected to answer it first; Ray Serve starts servers on request.

    Passes requests and streams on unchanged, follows each server's load and prefix cache, tries another server as long
    as nothing was answered. SIGTERM or Ctrl-C lets requests under way end first.
    """
    from ksana_jax.core.errors import ConfigError

    try:
        import aiohttp  # noqa: F401  imported to name the extra where one is absent
        import prometheus_client  # noqa: F401  likewise
        import starlette  # noqa: F401  likewise
    except ImportError as error:
        raise ImportError(f"ksana route needs {error.name}: pip install 'ksana-jax[server]'", name=error.name) from None
    from ksana_jax.serve.router import RouterSettings
    from ksana_jax.serve.router.proxy import running
    from ksana_jax.serve.router.proxy.spawning import LOCALHOST, read_replicas
    from ksana_jax.tokenizers import load_tokenizer

    if model is not None and model.startswith("-"):
        raise ConfigError(f"ksana route has no option {model}; options of ksana serve follow the model")
    addresses = [read_server(text) for text in (servers or "").split(",") if text.strip()]
    twice = [address for index, address in enumerate(addresses) if address in addresses[:index]]
    if twice:
        raise ConfigError(f"server {twice[0]} is given twice")
    least, most = (0, 0) if spawn == "0" else read_replicas(spawn)
    if bool(least) != (model is not None):
        raise ConfigError("--spawn needs a number of servers, from 1, and a model, such as --spawn 4 ksana-tiny")
    if bool(addresses) == bool(least):
        raise ConfigError("give either --servers with their addresses, or --spawn with a number and a model")
    if not least and (ray_resources is not None or ray_address != "auto"):
        option = "--ray-address" if ray_resources is None else "--ray-resources"
        raise ConfigError(f"{option} needs --spawn, which starts servers on a Ray cluster")
    given = engine_settings or []
    engine = {} if model is None else _engine_settings(model, given)
    if options["tokenizer"] is not None:
        load_tokenizer(options["tokenizer"])  # raises if there is none; the model's own may be absent
    server_key = None if server_api_key_file is None else read_api_keys(server_api_key_file)[0]
    settings = ProxySettings(
        **{**options, "tokenizer": options["tokenizer"] or model},
        api_keys=() if api_key_file is None else read_api_keys(api_key_file),
        admin_keys=() if admin_key_file is None else read_api_keys(admin_key_file),
        server_api_key=server_key,
    )
    router = RouterSettings(
        block_size=engine.get("block_size", DEFAULT_BLOCK_SIZE) if block_size is None else block_size,
        prefill_tokens_per_s=prefill_tokens_per_s,
        pool_tokens=pool_tokens,
        ttl_s=cache_ttl,
    )
    if least:
        from ksana_jax.engine.distributed.ray_connection import connected

        with connected(ray_address):
            from ksana_jax.serve import on_ray_serve

            resources = read_setting("ray_resources", ray_resources)
            host = LOCALHOST if ray_address == "local" else None
            application = on_ray_serve.build(model or "", given, settings, router, (least, most), resources, host)
            return running.run(on_ray_serve.run(application, settings))
    return running.run(running.route(settings, router, addresses))


def _engine_settings(model: str, given: list[str]) -> dict[str, Any]:
    """Returns the engine's among the arguments of `ksana serve`.

    Raises:
      ConfigError: `ksana serve` does not have such an option, or an option's value is of the wrong type.
    """
    from ksana_jax.core.errors import ConfigError

    app = groups.group("")
    app.command(cls=groups.ServeCommand)(serving.serve)
    try:
        with typer.main.get_command(app).make_context("ksana serve", [model, *given]) as context:
            return serving.models_and_settings(context.params["settings"] or [])[1]
    except groups.USAGE_ERROR as error:
        raise ConfigError(f"ksana serve: {error.format_message()}") from None  # pyright: ignore[reportAttributeAccessIssue]
