"""`ksana serve`: serves a model, or several, over HTTP."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ksana_jax.cli.fields import takes_fields
from ksana_jax.cli.options import ChatTemplate, Model, read_template
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.server.settings import ServerSettings, api_keys_of, read_api_keys, read_lora_modules

if TYPE_CHECKING:
    from ksana_jax.core.lora import LoRARequest
    from ksana_jax.engine.async_llm import AsyncLLM

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        help="settings of the engine as in YAML, such as block_size=8 enable_prefix_caching=false pattern.window=112; "
        "words without = are further models, which a request's model chooses",
        show_default=False,
    ),
]
Keys = Annotated[
    Path | None, typer.Option(help="keys of which clients must send one, one a line", show_default="no key")
]


@takes_fields(
    ServerSettings,
    "host port allowed_hosts allowed_origins max_num_queued_reqs max_num_queued_tokens "
    "shutdown_timeout_s=shutdown_timeout client_timeout_s=client_timeout kv_cache_metrics kv_cache_metrics_sample "
    "session_dir sleep_after sleep_level device_memory_bytes tool_call_parser",
)
def serve(
    model: Model,
    settings: Settings = None,
    *,
    options: dict[str, Any],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KSANA_API_KEY",
            help="a key that clients must send; other users of the machine can read it, so a file is safer",
            show_default="no key",
        ),
    ] = None,
    api_key_file: Keys = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="keys for /sessions and to load adapters, one a line", show_default="none")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="name of the model for clients; may be given several times", show_default="its own"),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="an adapter that PEFT has saved, a model of its own for clients; may be given several times",
            metavar="NAME=PATH",
            show_default="none",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    warm_up: Annotated[bool, typer.Option(help="compile steps ahead of requests")] = True,
) -> None:
    """Serves one or more models over HTTP with OpenAI's API: completions, chat, streams.

    Listens at once; /ready is 200 when the model has been loaded. SIGTERM or Ctrl-C lets accepted requests end first.
    """
    try:
        import uvicorn  # noqa: F401  imported to name the extra where it is absent
    except ImportError as error:
        raise ImportError(f"ksana serve needs {error.name}: pip install 'ksana-jax[server]'", name=error.name) from None
    from ksana_jax.serve.server.running import listen
    from ksana_jax.serve.server.running import serve as run

    given = ServerSettings(
        **options,
        api_keys=(
            *(() if api_key is None else api_keys_of(api_key, "--api-key")),
            *(() if api_key_file is None else read_api_keys(api_key_file)),
        ),
        admin_keys=() if admin_key_file is None else read_api_keys(admin_key_file),
        served_model_names=tuple(served_model_name or ()),
        lora_modules=read_lora_modules(lora_modules or ()),
    )
    others, engine = models_and_settings(settings or [])
    engine = _with_cache(engine)
    if others:
        if chat_template is not None:
            raise ConfigError(f"--chat-template is of one model, {len(others) + 1} are given")
        raise typer.Exit(_serve_several([model, *others], engine, warm_up, given))
    if given.device_memory_bytes is not None:
        raise ConfigError("--device-memory-bytes is for several models, and one is given: see memory_bytes")
    template = None if chat_template is None else read_template(model, chat_template)
    if given.lora_modules:
        engine = {"enable_lora": True, **engine}
    listener = listen(given)
    raise typer.Exit(run(lambda: _load(model, engine, template, warm_up, given.lora_modules), given, listener))


def models_and_settings(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the further models and the settings among the words that follow a model.

    Raises:
      ConfigError: a setting has no value, or cannot be read.
    """
    from ksana_jax.core.config import EngineConfig
    from ksana_jax.lab.runs.dotted import dotlist

    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    others = [word for word in words if "=" not in word and word.partition(".")[0] not in fields]
    return others, dotlist([word for word in words if word not in others])


def _serve_several(models: list[str], engine: dict[str, Any], warm_up: bool, given: ServerSettings) -> int:
    """Serves several models with equal settings; returns the exit code of the process."""
    from ksana_jax.serve.server.running import listen, serve
    from ksana_jax.serve.server.several import make_several_app, names_of

    if engine.get("distributed") is not None:
        raise ConfigError(f"distributed is set, and {len(models)} models are given: several processes serve one")
    of_name = dict(zip(names_of(models), models, strict=True))
    app = make_several_app(names_of(models), given)

    def load(name: str) -> AsyncLLM:
        own = engine
        if (folder := engine.get("disk_cache_dir")) is not None:
            own = engine | {"disk_cache_dir": str(Path(folder) / name)}
        return _load(of_name[name], own, None, warm_up)

    return serve(lambda: app.state.serving.load(load), given, listen(given), app)


def _with_cache(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with a prefix cache that explains misses, unless they say otherwise: each turn of a chat repeats
    the last."""
    return {"enable_prefix_caching": True, "prefix_report_blocks": 4096, **settings}


def _load(
    model: str,
    settings: dict[str, Any],
    chat_template: str | None,
    warm_up: bool,
    adapters: Sequence[LoRARequest] = (),
) -> AsyncLLM:
    """Loads a model; called in a thread while the server listens."""
    from ksana_jax.core.request import SamplingParams
    from ksana_jax.core.structured_outputs import StructuredOutputsParams
    from ksana_jax.engine.async_llm import AsyncLLM

    llm = AsyncLLM(model, **settings)
    for adapter in adapters:  # says now which cannot be used
        llm.engine.factory.adapter_of(adapter)
    if chat_template is not None and llm.tokenizer is not None:
        llm.tokenizer.set_templates({"default": chat_template}, "--chat-template")
    if warm_up and llm.llm is not None:
        # A request without a temperature samples; what greedy ones need is always included.
        asked = [SamplingParams()]
        if llm.tokenizer is not None and importlib.util.find_spec("llguidance") is not None:
            asked.append(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
        llm.llm.warm_up(sampling_params=asked, in_background=True)
    return llm
