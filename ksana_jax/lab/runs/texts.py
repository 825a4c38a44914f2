"""Cuts excerpts and prompts of exact length from texts. Knows tokens, not where texts come from."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.models import tokenizer_of
from ksana_jax.lab.runs.text_files import candidates

if TYPE_CHECKING:
    from ksana_jax import LLM


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """A part of a text.

    name: the text's name, with the offset unless it is the beginning. ids: its token ids. bos: whether they begin with
    BOS. first_scored: position of the first token that no earlier, overlapping excerpt has scored.
    """

    name: str
    ids: list[int]
    bos: bool = True
    first_scored: int = 1

    @property
    def digest(self) -> str:
        """Digest of the tokens, equal for equal excerpts regardless of the names of their texts."""
        return hashlib.sha256(np.array(self.ids, "<i8").tobytes()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class ExcerptSpec:
    """The cutting of excerpts.

    num_tokens: of each, BOS included. bos: whether they begin with BOS; None does as the tokenizer does. stride: at
    most this many tokens from one excerpt of a text to the next, in the text's order; None draws disjoint ones.
    setting: that gives num_tokens, for messages.
    """

    num_tokens: int
    bos: bool | None = None
    stride: int | None = None
    setting: str = "settings.prompt_tokens"

    def head(self, tokenizer: Any) -> list[int]:
        """Returns the ids with which an excerpt begins: BOS, or none.

        Raises:
          ConfigError: there is no tokenizer, or no BOS although it is asked for.
        """
        if tokenizer is None:
            raise ConfigError("texts need a tokenizer, which the model does not have")
        bos = tokenizer.bos_id
        if self.bos and bos is None:
            raise ConfigError("settings.bos is true, but the model's tokenizer has no BOS")
        adds = tokenizer.encode("")[:1] == [bos] if self.bos is None else self.bos
        return [bos] if adds and bos is not None else []

    def room(self, tokenizer: Any) -> int:
        """Returns the number of text tokens in an excerpt, BOS excluded; at least 1."""
        return max(self.num_tokens - len(self.head(tokenizer)), 1)

    def step(self, tokenizer: Any) -> int:
        """Returns the tokens from one excerpt of a text to the next; without a stride, the least."""
        return min(self.stride or self.num_tokens, self.room(tokenizer))


def draw_excerpts(files: Sequence[str], tokenizer: Any, num_texts: int, cut: ExcerptSpec, seed: int) -> list[Excerpt]:
    """Draws excerpts of exactly `cut.num_tokens` tokens.

    With a stride, the texts' excerpts form one list in order, and seed s takes its s-th num_texts. Without:

    All disjoint excerpts of the texts form one shuffled list: first the beginning of every text, then a random later
    place in each, and so on. Seed s takes the s-th num_texts of them, starting over at the end of the list, so seeds
    0, 1, 2, ... share nothing until the list is exhausted.

    Raises:
      ConfigError: the texts have fewer than num_texts excerpts; gives the numbers.
    """
    texts = candidates(files)
    order = np.random.default_rng(0).permutation(len(texts)).tolist() if cut.stride is None else range(len(texts))
    beginnings: list[Excerpt] = []
    for index in order:
        if cut.stride is None and (places := _places(index, texts, tokenizer, cut)):
            beginnings.append(_excerpt(texts[index], tokenizer, places[0], cut))
        if len(beginnings) == (seed + 1) * num_texts:
            return beginnings[-num_texts:]
    check_number(files, tokenizer, num_texts, cut, "settings.num_texts")
    found = [(index, _places(index, texts, tokenizer, cut)) for index in order]
    if cut.stride is None:
        rounds = range(max(len(places) for _, places in found))
        listed = [(index, places[r]) for r in rounds for index, places in found if r < len(places)]
    else:
        listed = [(index, place) for index, places in found for place in places]
    start = seed % (len(listed) // num_texts) * num_texts
    return [_excerpt(texts[i], tokenizer, place, cut) for i, place in listed[start : start + num_texts]]


def check_number(
    files: Sequence[str], tokenizer: Any, number: int, cut: ExcerptSpec, setting: str, window: int | None = None
) -> None:
    """Checks that the texts have as many excerpts as a setting requires.

    Args:
      window: of the attention pattern, which is of no effect on shorter texts.

    Raises:
      ConfigError: they have fewer; gives the setting, the available tokens, the excerpts that they allow, and the
        length of which they have enough.
    """
    texts, held, sizes = candidates(files), 0, []
    for _, text in texts:
        body = _body(tokenizer, text)
        sizes.append(len(body))
        held += _count(len(body), tokenizer, cut)
        if held >= number:
            return
    longest = max(sizes, default=0)
    room = bisect.bisect(range(1, longest + 1), False, key=lambda size: sum(n // size for n in sizes) < number)
    hint = f". Set {cut.setting}={room + len(cut.head(tokenizer))}" if room else ""
    if hint and window is not None and window >= room:
        hint += f" and pattern.window, {window:,} here, below it (grid.pattern.window=[...] if the grid sets it)"
    raise ConfigError(
        f"{setting} is {number}, but the texts have {held} excerpts of {cut.num_tokens:,} tokens: "
        f"{sum(sizes):,} tokens in total without BOS, the longest {longest:,}; files: {len(texts)}{hint}"
    )


def check_config(config: Mapping[str, Any], number: int, cut: ExcerptSpec, setting: str) -> None:
    """Does `check_number` with a trial's model and `texts`, before that is loaded; it may lack a tokenizer."""
    if (tokenizer := tokenizer_of(config["model"])) is not None:
        window = (config["pattern"] or {}).get("window")
        check_number(config["settings"]["texts"], tokenizer, number, cut, setting, window)


def _count(length: int, tokenizer: Any, cut: ExcerptSpec) -> int:
    """Returns how many excerpts a text of `length` tokens has."""
    return max((length - cut.room(tokenizer)) // cut.step(tokenizer) + 1, 0)


def _places(index: int, texts: Sequence[tuple[str, str]], tokenizer: Any, cut: ExcerptSpec) -> list[int]:
    """Returns the token offsets of a text's excerpts: 0, then random places in random order, or all strides."""
    size, length = cut.room(tokenizer), len(_body(tokenizer, texts[index][1]))
    count = _count(length, tokenizer, cut)
    if cut.stride is not None:
        return [number * cut.step(tokenizer) for number in range(count)]
    if count < 2:
        return [0] * count
    rng = np.random.default_rng([1, index])
    gaps = np.sort(rng.integers(0, length - count * size + 1, count - 1))
    return [0, *rng.permutation(np.arange(1, count) * size + gaps).tolist()]


def _excerpt(text: tuple[str, str], tokenizer: Any, place: int, cut: ExcerptSpec) -> Excerpt:
    head = cut.head(tokenizer)
    ids = head + _body(tokenizer, text[1])[place : place + cut.room(tokenizer)].tolist()
    first_scored = len(ids) - cut.step(tokenizer) if place else 1
    return Excerpt(f"{text[0]} from token {place:,}" if place else text[0], ids, bool(head), max(first_scored, 1))


@functools.lru_cache(maxsize=256)
def _body(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)


def cut_prompts(files: Sequence[str], tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Cuts texts into prompts, one after another, in an order drawn by the seed. Of a single text, seed s takes the
    s-th num_prompts, starting over at its end.

    Returns:
      num_prompts lists of exactly num_tokens token ids, each beginning with BOS if the tokenizer adds it.

    Raises:
      ConfigError: the texts are too short; gives the numbers.
    """
    texts, cut = candidates(files), ExcerptSpec(num_tokens)
    head, step = cut.head(tokenizer), cut.room(tokenizer)
    size = num_tokens - len(head)
    found: list[list[int]] = []
    for index in np.random.default_rng(seed).permutation(len(texts)):
        body = _body(tokenizer, texts[index][1]).tolist()
        found += [head + body[i : i + size] for i in range(0, len(body) - step + 1, step)]
        if len(found) >= num_prompts:
            start = seed % (len(found) // num_prompts) * num_prompts if len(texts) == 1 else 0
            return found[start : start + num_prompts]
    check_number(files, tokenizer, num_prompts, cut, "the number of prompts")
    raise AssertionError("what is counted can be cut")


def prompts_for(llm: LLM, files: Sequence[str], num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Cuts texts into prompts for an engine, see `cut_prompts`; draws random tokens for a model without a tokenizer."""
    if llm.tokenizer is not None:
        return cut_prompts(files, llm.tokenizer, num_prompts, num_tokens, seed)
    return random_prompts(llm, num_prompts, num_tokens, seed)


def random_prompts(llm: LLM, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    shape = num_prompts, num_tokens
    return np.random.default_rng(seed).integers(0, llm.model_config.vocab_size, shape).tolist()
