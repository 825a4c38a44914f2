"""Generation settings of lm-evaluation-harness tasks as sampling parameters. Knows no engine and no harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ksana_jax.core.request import MAX_STOP_STRINGS, SamplingParams

# Names of the maximum number of generated tokens; the first one that is given counts.
MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
MAX_STOP_CHARACTERS = 256  # of a stop string that the engine accepts


def stop_strings(settings: Mapping[str, Any]) -> list[str]:
    """Returns the strings that end a generation: `until`, a string or a list; empty ones have no effect.

    Raises:
      ValueError: it is neither.
    """
    until = settings.get("until") or []
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, (list, tuple)) or not all(isinstance(text, str) for text in until):
        raise ValueError(f"until is {until!r:.60}, must be a string or a list of strings")
    return [text for text in until if text]


def sampling_params(settings: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
    """Translates a task's generation_kwargs.

    Greedy if do_sample is false, or if neither do_sample nor a temperature above 0 is given; do_sample alone means
    temperature 1. Names other than these, `until` and the maximum length's are fields of `SamplingParams`.

    Raises:
      ValueError: a name or a value is not supported.
    """
    given = {name: value for name, value in settings.items() if name != "until" and value is not None}
    lengths = [int(given.pop(name)) for name in MAX_TOKENS_NAMES if name in given]
    do_sample = given.pop("do_sample", None)
    if given.get("num_beams") == 1:
        del given["num_beams"]
    if "num_beams" in given:
        raise ValueError(f"num_beams is {given['num_beams']!r}, supported: 1")
    temperature = float(given.pop("temperature", 1.0 if do_sample else 0.0))
    if do_sample is False or temperature == 0:
        temperature = 0.0
        given = {name: value for name, value in given.items() if name not in ("top_p", "top_k", "min_p")}
    # The engine takes a limited number of short stop strings; `cut` applies all of them.
    stops = [text for text in stop_strings(settings) if len(text) <= MAX_STOP_CHARACTERS][:MAX_STOP_STRINGS]
    max_tokens = lengths[0] if lengths else default_max_tokens
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, stop=stops or None, **given)


def cut(text: str, until: Sequence[str]) -> str:
    """Returns the text before the first of the given strings in it."""
    ends = [at for stop in until if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def prompt_room(max_model_len: int, max_tokens: int) -> int:
    """Returns the number of prompt tokens that leave room for max_tokens of output.

    Raises:
      ValueError: there is none.
    """
    if max_tokens >= max_model_len:
        raise ValueError(f"max_gen_toks is {max_tokens:,}, must be below max_model_len {max_model_len:,}")
    return max_model_len - max_tokens
