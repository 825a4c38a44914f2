"""Shared by all kinds of workload: their settings, and how lengths become requests."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.arrivals import generator
from ksana_jax.serve.workload.items import WorkItem, Workload, asked_for
from ksana_jax.serve.workload.tokens import FIRST_TOKEN, key_of, stream

# Turns a text into token ids; only workloads made of texts use it.
Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadSettings(abc.ABC):
    """Settings of a kind of workload, as in YAML. Base of all kinds.

    Args:
      name: for tables; empty takes the name of the preset, the kind or the file.
      num_requests: number of requests; for a trace, its first rows, None for all.
      seed: for all that is drawn. Prompts of different seeds have no common prefix.
      text_seed: for the tokens alone; None takes the seed. The same requests with other texts can be sent to a server
        again, which would otherwise find their prompts in its cache.
      max_tokens: what every client asks for, which cuts longer answers off; None asks for the least of 64, 256, 1,024,
        4,096, ... that has room for the answer, as a client would that knows roughly what it wants.
      oracle: clients ask for exactly the length of the answer. Schedulers then know it, which gives bounds only.
      max_prompt, max_output: longer prompts and answers are cut to this; None cuts none.
      clients: {name: share of the requests}; empty for one client without a name.
    """

    name: str = ""
    num_requests: int | None = 1000
    seed: int = 0
    text_seed: int | None = None
    max_tokens: int | None = None
    oracle: bool = False
    max_prompt: int | None = None
    max_output: int | None = None
    clients: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        name = type(self).__name__
        checks.require(
            None if isinstance(self.name, str) else f"{name}: name is {self.name!r:.60}, must be a text",
            checks.integer(f"{name}: num_requests", self.num_requests, optional=True),
            checks.integer(f"{name}: seed", self.seed, 0, 2**63 - 1),
            checks.integer(f"{name}: text_seed", self.text_seed, 0, 2**63 - 1, optional=True),
            checks.integer(f"{name}: max_tokens", self.max_tokens, optional=True),
            checks.boolean(f"{name}: oracle", self.oracle),
            checks.integer(f"{name}: max_prompt", self.max_prompt, optional=True),
            checks.integer(f"{name}: max_output", self.max_output, optional=True),
            None
            if isinstance(self.clients, Mapping)
            else f"{name}: clients is {self.clients!r:.60}, must be a mapping",
            error=ConfigError,
        )
        for client, share in self.clients.items():
            checks.require(checks.number(f"{name}: clients[{client}]", share, above=0), error=ConfigError)
        self.check()

    def check(self) -> None:  # noqa: B027  a kind without fields has nothing to check
        """Checks the fields of the subclass.

        Raises:
          ConfigError: one is out of range.
        """

    def make(self, vocab_size: int, encode: Encode | None = None) -> Workload:
        """Returns the workload for a model.

        Args:
          vocab_size: prompts have ids below it.
          encode: the model's tokenizer, for workloads made of texts; without it four characters count as one token.

        Raises:
          ConfigError: vocab_size is too small, or a trace cannot be read.
        """
        checks.require(checks.integer("vocab_size", vocab_size, FIRST_TOKEN + 1), error=ConfigError)
        return self._make(vocab_size, encode)

    @abc.abstractmethod
    def _make(self, vocab_size: int, encode: Encode | None) -> Workload: ...

    # ------------------------------------------------------------------ for subclasses

    @property
    def label(self) -> str:
        """The name of the workload."""
        return self.name or type(self).__name__.lower()

    @property
    def seed_of_texts(self) -> int:
        return self.seed if self.text_seed is None else self.text_seed

    def cut(self, prompts: np.ndarray, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Returns lengths cut to max_prompt and max_output, and what a reader of results must know about it."""
        notes = []
        if self.max_prompt is not None and (count := int((prompts > self.max_prompt).sum())):
            notes.append(f"{count:,} of {len(prompts):,} prompts cut to {self.max_prompt:,} tokens")
            prompts = np.minimum(prompts, self.max_prompt)
        if self.max_output is not None and (count := int((outputs > self.max_output).sum())):
            notes.append(f"{count:,} of {len(outputs):,} answers cut to {self.max_output:,} tokens")
            outputs = np.minimum(outputs, self.max_output)
        return prompts, outputs, notes

    def client_names(self, count: int) -> list[str]:
        """Draws the client of each request or session."""
        if not self.clients:
            return [""] * count
        names, shares = list(self.clients), np.array(list(self.clients.values()))
        drawn = generator(self.seed, "clients").choice(len(names), count, p=shares / shares.sum())
        return [names[number] for number in drawn]

    def singles(
        self,
        vocab_size: int,
        arrivals: np.ndarray,
        prompts: np.ndarray,
        outputs: np.ndarray,
        tokens: Sequence[Callable[[], np.ndarray]] | None = None,
    ) -> list[WorkItem]:
        """Returns requests that do not depend on each other; prompts of their own unless `tokens` gives them."""
        items = []
        clients = self.client_names(len(arrivals))
        for index, (arrival, prompt, output) in enumerate(
            zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        ):
            output, max_tokens = asked_for(output, self.max_tokens, self.oracle)
            text = functools.partial(own_text, self.seed_of_texts, index, vocab_size)
            items.append(
                WorkItem(
                    index,
                    arrival,
                    prompt,
                    output,
                    max_tokens,
                    functools.partial(text, 0, prompt) if tokens is None else tokens[index],
                    functools.partial(text, prompt, output),
                    clients[index],
                )
            )
        return items


def own_text(seed: int, index: int, vocab_size: int, start: int, count: int) -> np.ndarray:
    """Returns tokens of the text of one request, prompt and answer, that it shares with no other."""
    return stream(key_of("request", seed, index), start, count, vocab_size)
