"""Arguments and options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ksana_jax.core.sources import MODEL_HELP

if TYPE_CHECKING:
    from ksana_jax import LLM, SamplingParams

Experiment = Annotated[Path, typer.Argument(help="a YAML file, or the name of a shipped one", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="dotted.key=value, such as engine.block_size=8", show_default=False)
]
Out = Annotated[Path | None, typer.Option(help="output folder", show_default="runs/NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="also print one line of JSON at the end")]
KVEviction = Annotated[
    str | None,
    typer.Option(
        help="KV eviction as in YAML, such as '{method: h2o, budget: 0.2}'", show_default=False, metavar="YAML"
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="platform to run on, such as cpu or npu, or as in YAML: '{platform: npu, plugin: loopback}'",
        show_default="jax's choice",
        metavar="YAML",
    ),
]

Distributed = Annotated[
    str | None,
    typer.Option(
        help="processes that divide the model: auto under Slurm or Open MPI, or as in YAML: '{coordinator_address: "
        "10.0.0.1:1234, num_processes: 2, process_id: 0}'; the others run ksana worker",
        show_default=False,
        metavar="YAML",
    ),
]

# Arguments of commands that generate text.
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
MaxTokens = Annotated[int, typer.Option(help="maximum tokens of output")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="what formats conversations: a Jinja file or text, or the name of one of the model's templates",
        show_default="the model's default",
    ),
]


def read_setting(name: str, text: str | None) -> Any:
    """Returns the value of a setting that is written as in a YAML file; None if it is not given.

    Raises:
      ConfigError: it is not YAML.
    """
    from ksana_jax.lab.experiments.dotted import dotlist

    return None if text is None else dotlist([f"{name}={text}"])[name]


def read_template(model: str, given: str) -> str:
    """Returns the chat template that a `ChatTemplate` names.

    Raises:
      ConfigError: it is neither a template, nor a file in UTF-8, nor the name of one of the model's templates.
    """
    from ksana_jax.core.errors import ConfigError, system_reason
    from ksana_jax.tokenizers import find_tokenizer

    if "{{" in given or "{%" in given:
        return given
    path = Path(given)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        tokenizer = find_tokenizer(model)
        named = {} if tokenizer is None else tokenizer.chat_templates
        if given in named:
            return named[given]
        names = f"; the model's templates are {', '.join(named)}" if named else ""
        raise ConfigError(f"the chat template cannot be read from {path}: {system_reason(error)}{names}") from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start:,} is not UTF-8"
        raise ConfigError(f"the chat template cannot be read from {path}: {reason}") from None


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Options of commands that generate text: sampling and engine settings."""

    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token")] = 0.8
    top_p: Annotated[float, typer.Option(help="sample from the smallest set of tokens with this probability")] = 0.95
    seed: Annotated[int | None, typer.Option(help="equal seeds give equal texts", show_default=False)] = None
    dtype: Annotated[str, typer.Option(help="weights and KV: f32, bf16, f16, or auto for the checkpoint's")] = "f32"
    numerics: Annotated[str, typer.Option(help="fast, or invariant: the same bits however a text is served")] = "fast"
    window: Annotated[int | None, typer.Option(help="attention window in tokens", show_default=False)] = None
    num_sinks: Annotated[int, typer.Option(help="sink tokens at cache positions, with --window")] = 0
    max_model_len: Annotated[
        int | None, typer.Option(help="maximum tokens of prompt plus output", show_default=False)
    ] = None
    tensor_parallel_size: Annotated[int, typer.Option(help="devices that divide the model")] = 1
    data_parallel_size: Annotated[int, typer.Option(help="replicas, each on as many devices")] = 1
    device: Device = None
    distributed: Distributed = None

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """Returns these options as SamplingParams."""
        from ksana_jax import SamplingParams

        return SamplingParams(max_tokens=max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed)

    def make_llm(self, model: str, **settings: Any) -> LLM:
        """Creates an engine that serves one request at a time."""
        from ksana_jax import LLM, AttentionPattern

        if self.num_sinks and self.window is None:
            raise ValueError(f"--num-sinks {self.num_sinks} needs --window")
        windowed = None if self.window is None else AttentionPattern(window=self.window, num_sinks=self.num_sinks)
        return LLM(
            model,
            dtype=self.dtype,
            numerics=self.numerics,
            max_num_seqs=1,
            max_model_len=self.max_model_len,
            tensor_parallel_size=self.tensor_parallel_size,
            data_parallel_size=self.data_parallel_size,
            pattern=windowed,
            device=read_setting("device", self.device),
            distributed=read_setting("distributed", self.distributed),
            **settings,
        )


def takes_text_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter `options` in a command's signature by the fields of TextOptions, for typer."""
    hints = get_type_hints(TextOptions, include_extras=True)
    fields = dataclasses.fields(TextOptions)

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        options = TextOptions(**{field.name: given.pop(field.name) for field in fields})
        command(**given, options=options)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.name != "options"]
    parameters += [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields
    ]
    with_options.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
