"""Stop strings: special tokens among them, and their search in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence

from ksana_jax.core.request import SamplingParams
from ksana_jax.tokenizers import Tokenizer


def special_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> dict[int, str]:
    """Returns the special tokens among stop strings by id, if the text that is searched leaves special tokens out.

    Raises:
      ValueError: a stop string has a special token and other text, so it would never be found.
    """
    found: dict[int, str] = {}
    if tokenizer is None or not params.skip_special_tokens:
        return found
    for stop in params.stop_strings:
        try:
            ids = tokenizer.encode(stop, add_special_tokens=False)
        except ValueError:  # the vocabulary cannot express it
            continue
        for token in ids:
            piece = tokenizer.piece(token)
            text = piece.data.decode(errors="replace")
            if piece.special and text == stop:
                found[token] = stop
            elif piece.special and text and text in stop:
                raise ValueError(
                    f"stop has {stop!r:.60}, which is never found: the text leaves {text!r:.60} out; give that token "
                    "alone, or skip_special_tokens=False"
                )
    return found


def search(text: str, ending: Sequence[str], stops: Sequence[str]) -> tuple[int, str, str | None]:
    """Searches a text for the first of some stop strings.

    Args:
      ending: those that may end it. stops: all of them, whose beginnings at the end of the text are held back.

    Returns:
      Length of the text before the stop string, or that cannot become part of one; the text to hold back; the stop
      string, or None.
    """
    if found := [(text.find(stop), stop) for stop in ending if stop in text]:
        at, stop = min(found)
        return at, "", stop
    length = len(text) - max((_overlap(text, stop) for stop in stops), default=0)
    return length, text[length:], None


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of text that is a prefix of stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
