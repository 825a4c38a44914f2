"""Arguments and options that several commands share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ksana_jax.cli import completion
from ksana_jax.core.sources import MODEL_HELP

if TYPE_CHECKING:
    from ksana_jax import LLM, SamplingParams

Experiment = Annotated[
    Path,
    typer.Argument(
        help="a YAML file, or the name of a shipped one", show_default=False, autocompletion=completion.experiments
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="dotted.key=value, such as engine.block_size=8", show_default=False, autocompletion=completion.overrides
    ),
]
Out = Annotated[Path | None, typer.Option(help="output folder", show_default="runs/NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="also print one line of JSON at the end")]
OwnCode = Annotated[
    bool,
    typer.Option("--own-code", help="run own tasks and methods that the files name: code of their authors"),
]
# Arguments of commands that generate text.
Model = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)]
MaxTokens = Annotated[int, typer.Option(help="maximum tokens of output")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="what formats conversations: a Jinja file or text, or the name of one of the model's templates",
        show_default="the model's default",
    ),
]


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
    """Options of commands that generate text: sampling and engine settings.

    Args:
      temperature: 0 always takes the most probable token.
      top_p: sample from the smallest set of tokens with this probability.
      seed: equal seeds give equal texts; None takes the engine's.
      structured_outputs: what the text follows, as in YAML, such as '{json_object: true}' or '{regex: "[a-z]+"}'; None
        means anything.
      dtype: weights and KV: f32, bf16, f16, or auto for the checkpoint's.
      numerics: fast, or invariant: the same bits however a request is served.
      window: attention window in tokens; None takes the model's.
      num_sinks: sink tokens at cache positions, with --window.
      max_model_len: maximum tokens of prompt plus output; None takes the model's.
      tensor_parallel_size: devices that divide the model.
      data_parallel_size: replicas, each on as many devices.
      device: platform to run on, such as cpu or npu, or as in YAML: '{platform: npu, plugin: PATH.so}'; None takes
        jax's choice.
      distributed: processes that divide the model: auto under Slurm or Open MPI, or as in YAML: '{coordinator_address:
        10.0.0.1:1234, num_processes: 2, process_id: 0}', with each its process_id; None means one process.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int | None = None
    structured_outputs: Any = None
    dtype: str = "f32"
    numerics: str = "fast"
    window: int | None = None
    num_sinks: int = 0
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    device: Any = None
    distributed: Any = None

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """Returns these options as SamplingParams."""
        from ksana_jax import SamplingParams

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            structured_outputs=self.structured_outputs,
        )

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
            device=self.device,
            distributed=self.distributed,
            **settings,
        )
