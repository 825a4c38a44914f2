"""Shared by all eviction methods: how many tokens a layer keeps, when it evicts, and the protocol by which a
method chooses among them. NumPy on the host; on the device the same formulas run on jax arrays.

A method is a frozen dataclass: its fields are the settings under `kv_eviction`, and `priority` says which tokens stay.
When and how many is arithmetic on the numbers of tokens alone: the host knows it without asking the device, and a text
that is computed again after a preemption evicts the same tokens at the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of
from ksana_jax.kv.eviction.settings import problems_of

Array: TypeAlias = Any  # NumPy on the host, jax in a compiled program


class Cached(NamedTuple):
    """The cached tokens of n rows in one group of layers, from which a method chooses; C slots, in text order.

    keys, values: [n, Lg, K, C, H]. Keys are rotated at their sequence positions, or not at all with positions "cache".
    scores: [n, Lg, K, C] float32, attention that each token has received; [..., X] with `num_scores` X > 1; or None.
    text_positions: [n, Lg, K, C] int32; None unless the method asks for them.
    num_tokens: [n] tokens in the cache; slots beyond them are undefined.
    num_recent: [n] newest tokens that stay, whatever their priority.
    length: [n] tokens of the text so far.
    group: [n] number of the group of layers.
    given: [n, Lg, K, C] float32, of `EvictionMethod.given`; None if the method has none.
    num_kept: [n] tokens that a head keeps; with `per_head`, the mean over the heads that share a budget.
    num_sinks: [n] first tokens that stay, whatever their priority.
    num_prompt: [n] tokens of the prompt, without a question.
    constants: [n, Lg, ...] by name, of `EvictionMethod.constants`, one for each layer.
    output_norms: [n, Lg, N, C] float32, L1 norms of values after a head's output matrix; None unless asked for.
    state: [n, Lg, K, ...] float32, what the text's queries have added, see `EvictionMethod.state_shape`; or None.
    """

    keys: Array
    values: Array
    scores: Array
    text_positions: Array
    num_tokens: Array
    num_recent: Array
    length: Array
    group: Array
    given: Array = None
    num_kept: Array = None
    num_sinks: Array = None
    num_prompt: Array = None
    constants: Mapping[str, Array] = {}
    state: Array = None
    output_norms: Array = None


class Observation(NamedTuple):
    """Inputs of `observed_logits` besides the scores; all broadcast to [S, K, R, C].

    layer: in the model. head: of the query. query: its sequence position. slot: the key's index in the cache. number:
    the query's, see `EvictionMethod.query_numbers`.
    """

    layer: Array
    head: Array
    query: Array
    slot: Array
    number: Array


class Merged(NamedTuple):
    """How the tokens of n rows that go are merged into those that stay.

    A token that stays becomes the weighted mean of itself and those merged into it, keys and values alike.

    into: [n, Lg, K, C] int32, the slot of a token that stays, for each token that goes; others are not read.
    weights: [n, Lg, K, C] float32 of all tokens: above 0 for those that stay, 0 for those that are dropped.
    state: `Cached.state` after the eviction; None leaves it.
    """

    into: Array
    weights: Array
    state: Array = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionMethod:
    """Decides which cached tokens a row keeps when it has more than its budget. Base of all methods.

    Args:
      budget: maximum tokens that a layer caches of a row. A float up to 1 is a fraction of the prompt (0.2), an int a
        number of tokens. A prompt that is computed whole is cached whole until it is complete.
      sinks: first tokens of the text, always kept.
      recent: newest tokens, always kept: a float up to 1 is a fraction of the budget, an int a number of tokens.
      interval: tokens evicted at a time, so that the cache holds from budget - interval + 1 to budget tokens.
        None takes the block size; 1 evicts after every token, as papers define their methods.
      prompts: "whole" computes a prompt with all of its keys and evicts from then on. "once" evicts when a prompt is
        complete and keeps all that follows, as the presses of kvpress do. "streamed" evicts while a prompt is computed,
        as if it had been generated, so that scoring a long text measures the method. The prompt of a request with a
        question ends before the question.
      layers: "uniform" gives all layers the same budget. "pyramid" gives earlier layers more, decreasing linearly, of
        the tokens beyond those that each layer keeps anyway: `sinks`, a number of `recent` tokens, and interval - 1.
        Budgets have the same sum as in "uniform", up to rounding (PyramidKV, arXiv:2406.02069, section 3.2).
      beta: steepness of a pyramid, from 1, where all layers are equal: of the tokens beyond, the last layer gets 1/beta
        of the mean and the first 2 - 1/beta. If the budget is a fraction of the prompt, or the method evicts once, no
        layer gets more than the prompt, and the line is that much less steep.
      positions: "absolute" leaves keys at their sequence positions; "cache" rotates a key by its index in the cache.
      memory: "freed" returns the memory of evicted tokens. "simulated" leaves it as it is and hides the tokens from all
        queries, to study quality alone: the same tokens, nothing is saved, and results are marked as simulated.
    """

    budget: float | int = 0.2
    sinks: int = 0
    recent: float | int = 0
    interval: int | None = None
    prompts: Literal["whole", "once", "streamed"] = "whole"
    layers: Literal["uniform", "pyramid"] = "uniform"
    beta: float = 20
    positions: Literal["absolute", "cache"] = "absolute"
    memory: Literal["freed", "simulated"] = "freed"

    # True if `Cached.scores` sums the attention weights of queries.
    observes: ClassVar[bool] = False
    # "max" if `Cached.scores` has the largest weight of any query instead of the sum.
    score_reduction: ClassVar[Literal["sum", "max"]] = "sum"
    # True if a row computes the tokens of `probe` before it evicts.
    probes: ClassVar[bool] = False
    # True if each eviction resets the sums, and the state, to zero.
    resets_scores: ClassVar[bool] = False
    # True if `observed_logits` replaces the attention scores before the softmax.
    custom_logits: ClassVar[bool] = False
    # True if `Cached.constants` has the layers' ropes: inv_freq and rope_scale [n, Lg, H/2], see `models.rope.Rope`.
    reads_ropes: ClassVar[bool] = False
    # True if it reads `Cached.output_norms`; an engine then keeps a copy of its output matrices.
    reads_outputs: ClassVar[bool] = False
    # True if it needs the whole text beforehand, in `given`: it evicts while a text is scored, and cannot generate.
    needs_full_text: ClassVar[bool] = False
    # True if what a KV head keeps depends on no other head, nor on its number: several devices may divide the heads.
    head_by_head: ClassVar[bool] = False
    # True if `merge` folds the tokens that go into those that stay; otherwise they are dropped.
    merges: ClassVar[bool] = False
    # Codec of fewer bits in which tokens that go are kept, several to a slot; "" drops them. See `low_slots`.
    low_codec: ClassVar[Any] = ""
    # True if `low_factors` multiply keys before they are encoded in `low_codec`.
    balances: ClassVar[Any] = False
    # True if the KV heads of a layer share one budget, so that their tokens with the highest priority stay.
    per_head: ClassVar[bool] = False
    # True if `budgets` divides the budget among layers, or with `per_head` among KV heads, by what `measure` returns.
    # Each of them then has separate blocks, so that the memory of evicted tokens is freed.
    measures: ClassVar[bool] = False

    def __post_init__(self):
        name = f"kv_eviction {type(self).__name__}"
        checks.require(
            _share(f"{name}: budget", self.budget, least=1),
            _share(f"{name}: recent", self.recent, least=0),
            checks.integer(f"{name}: sinks", self.sinks, 0),
            checks.integer(f"{name}: interval", self.interval, 1, optional=True),
            checks.one_of(f"{name}: prompts", self.prompts, ("whole", "once", "streamed")),
            checks.one_of(f"{name}: layers", self.layers, ("uniform", "pyramid")),
            checks.number(f"{name}: beta", self.beta, 1),
            f"{name}: beta is {self.beta}, but layers is uniform: only a pyramid has a beta"
            if self.layers == "uniform" and self.beta != EvictionMethod.beta
            else None,
            checks.one_of(f"{name}: positions", self.positions, ("absolute", "cache")),
            checks.one_of(f"{name}: memory", self.memory, ("freed", "simulated")),
            *(f"{name}: {problem}" for problem in problems_of(self)),
            error=ConfigError,
        )

    @property
    def hides(self) -> bool:
        """True if evicted tokens keep their memory and no query sees them."""
        return self.memory == "simulated"

    @property
    def marks_blocks(self) -> bool:
        """True if blocks hold more than keys and values: sums over queries, or which tokens are hidden."""
        return self.adds_up or self.hides

    @property
    def across_layers(self) -> bool:
        """True if the heads of all layers share one budget; only with `per_head`."""
        return False

    def priority(self, cached: Cached, xp: Any) -> Array:
        """Returns [n, Lg, K, C]: the highest stay, among tokens that are neither sinks nor recent.

        Args:
          xp: numpy or jax.numpy.
        """
        raise NotImplementedError

    def merge(self, cached: Cached, stays: Array, xp: Any) -> Merged:
        """Returns how tokens that go are merged into others; only with `merges`.

        Args:
          stays: [n, Lg, K, C] bool; False for unused slots too.
          xp: numpy or jax.numpy.
        """
        raise NotImplementedError

    def measure(self, cached: Cached, xp: Any) -> Array:
        """Returns [n, Lg, K, ...] float32, what `budgets` needs of a complete prompt; only with `measures`.

        Args:
          cached: `num_kept` is the mean of the budgets.
          xp: jax.numpy, or numpy in tests.
        """
        raise NotImplementedError

    def budgets(self, measured: np.ndarray, num_kept: int, num_prompt: int) -> np.ndarray:
        """Returns how many tokens each evicting layer keeps of a prompt, [L], or with `per_head` each KV head, [L, K].

        The engine rounds to whole intervals, with at least the sinks and recent tokens and at most the prompt, so that
        the sum is that of equal budgets.

        Args:
          measured: [L, K, ...] of `measure`. num_kept: mean of the budgets. num_prompt: tokens of the prompt.
        """
        raise NotImplementedError

    def low_slots(self, num_tokens: Array, num_kept: Array, num_stay: Array, per_slot: int, xp: Any) -> Array:
        """Returns how many of the slots that rows keep hold tokens in `low_codec`: [n], as many for all heads.

        They follow the sinks. At most num_kept - num_stay, and no more than hold num_tokens together with the others.

        Args:
          num_tokens: [n] tokens in the cache, also in `low_codec`. num_kept: [n] slots. num_stay: [n] sinks and recent
            tokens. per_slot: tokens that a slot holds.
        """
        raise NotImplementedError

    def low_factors(self, cached: Cached, xp: Any) -> Array:
        """Returns factors [n, Lg, K, H] of keys, which become the state; only with `balances`.

        `state_shape` is (H,), and queries add nothing: the state is 0 until the first eviction.
        """
        raise NotImplementedError

    @property
    def once(self) -> bool:
        """True if it evicts when a prompt is complete and never again."""
        return self.prompts == "once"

    @property
    def needs_text_positions(self) -> bool:
        """True if `priority` reads `Cached.text_positions`."""
        return False

    @property
    def stored(self) -> str:
        """Describes how blocks differ from an engine's without eviction; equal descriptions can share blocks."""
        return f"{self.positions} positions" + ", text positions" * self.needs_text_positions + ", masks" * self.hides

    @property
    def num_known(self) -> int:
        """Returns the length of the text that a method with `needs_full_text` knows; 0 for others."""
        return 0

    def given(self, group: int, lengths: np.ndarray) -> np.ndarray | None:
        """Returns scores [n, Lg, K, T] float32 of a text's tokens at lengths [n], for `Cached.given`; None by default.

        A method that has some asks for `Cached.text_positions` too.

        Args:
          group: of layers.
        """
        return None

    def num_scores(self, num_queries: int) -> int:
        """Returns X, how many sums over queries `Cached.scores` has for each token: 1, or as many as `observed` returns
        for num_queries query heads of a kv head."""
        return 1

    def observed(self, weights: Array, xp: Any) -> Array:
        """Returns the sums [X, S, K, C] that attention weights add to `Cached.scores`; only with several `num_scores`.

        Args:
          weights: [S, K, G, Q, C] float32 of S rows' Q queries, times `query_factor`.
        """
        raise NotImplementedError

    def state_shape(self, num_queries: int, head_dim: int) -> tuple[int, ...] | None:
        """Returns the shape of the state that a row has in each layer and kv head; None, the default, for none.

        It takes memory in every block: each holds what the queries of its own tokens have added.

        Args:
          num_queries: G, query heads that share a kv head. head_dim: H.
        """
        return None

    def observe(self, q: Array, text_positions: Array, xp: Any) -> Array:
        """Returns what queries add to the state of their rows, [T, K, ...] with `state_shape` at the end.

        Args:
          q: [T, K, G, H] float32, before the rotation, scaled. text_positions: [T].
        """
        raise NotImplementedError

    @property
    def adds_up(self) -> bool:
        """True if blocks hold more than the keys and values of their tokens: sums over queries."""
        return self.observes or self.state_shape(1, 2) is not None

    def constants(self) -> dict[str, np.ndarray]:
        """Returns arrays [L, ...] of numbers about the model's layers, for `Cached.constants`; none by default."""
        return {}

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray | None:
        """Returns a float32 number for each query of a step, which `query_factor` and `observed_logits` receive.

        None, the default, counts all queries alike.

        Args:
          until_eviction: [Gk, T] number of queries up to the row's next eviction, this one included. If the method
            probes, FAR for queries outside of a probe.
          num_outputs: [T] tokens generated up to this one; 0 or less in a prompt.

        Returns:
          An array that broadcasts to [Gk, T].
        """
        return None

    @property
    def weights_queries(self) -> bool:
        """True if `query_numbers` returns numbers."""
        return self.query_numbers(np.ones((1, 1)), np.ones(1)) is not None

    @property
    def counts_outputs(self) -> bool:
        """True if `query_numbers` depends on num_outputs."""
        numbers = self.query_numbers(np.ones((1, 64)), np.arange(64))
        return numbers is not None and len(np.unique(numbers)) > 1

    def query_factor(self, numbers: Array) -> Array:
        """Returns the factor of a query's attention weights as they are added to the scores: float32, not negative."""
        return numbers

    def observed_logits(self, logits: Array, seen: Observation, xp: Any) -> Array:
        """Returns the scores whose softmax is observed, [S, K, R, C]; only with `custom_logits`."""
        return logits

    def probe(self, context: np.ndarray) -> np.ndarray:
        """Returns the token ids that a row computes after its context and before it evicts; only with `probes`.

        Their keys and values are dropped, and the text continues after the context. A prompt without a question ends
        its context one token early, so that a token follows.

        Args:
          context: [n] token ids.
        """
        raise NotImplementedError

    def encoded(self, tokenizer: Any) -> EvictionMethod:
        """Returns the method with token ids instead of texts.

        Args:
          tokenizer: the engine's; None without one.

        Raises:
          ConfigError: it needs one.
        """
        return self

    @property
    def setting(self) -> dict[str, Any]:
        """The method as a value of `kv_eviction`."""
        return {"method": name_of(type(self))} | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def compiled(self) -> EvictionMethod:
        """The method without the numbers that only the host reads: equal methods need the same compiled programs."""
        of_host = {f.name for f in dataclasses.fields(EvictionMethod)} - {"positions", "memory"}
        of_host -= {"prompts"} if self.measures else set()  # others are refused
        return dataclasses.replace(self, **{f.name: f.default for f in dataclasses.fields(self) if f.name in of_host})

    def shares(self, num_layers: int) -> tuple[float, ...]:
        """Returns each evicting layer's share of the tokens beyond the minimum that all layers keep; the mean is 1."""
        if self.layers == "uniform" or num_layers == 1:
            return (1.0,) * num_layers
        return tuple((1 + (1 - 1 / self.beta) * np.linspace(1, -1, num_layers)).tolist())


def _share(name: str, value: Any, least: int) -> str | None:
    if isinstance(value, (float, np.floating)):
        return checks.number(name, value, above=0 if least else None, low=None if least else 0, high=1)
    return checks.integer(name, value, least)
