"""KV eviction written again in float64 NumPy: one text, one token at a time, no blocks, no chunks. Each layer and kv
head has a list of the text positions that it still has; each method is its paper's rule for what to drop from it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np

from tests.counted_evictions import one_by_one
from tests.reference import _norm, _rotate


@dataclasses.dataclass
class Head:
    """State of one kv head of one layer: text positions, and by position keys before rotation, keys as they are stored,
    values and scores."""

    kept: list[int] = dataclasses.field(default_factory=list)
    keys: dict = dataclasses.field(default_factory=dict)
    stored: dict = dataclasses.field(default_factory=dict)
    values: dict = dataclasses.field(default_factory=dict)
    scores: dict = dataclasses.field(default_factory=dict)
    newest: list = dataclasses.field(default_factory=list)  # weights of the last queries, {position: weight} each
    weights: list = dataclasses.field(default_factory=list)  # of all queries
    apart: list = dataclasses.field(default_factory=list)  # of all queries, [G, tokens] of the query heads
    threshold: float | None = None  # of similarity, for merging
    past: list = dataclasses.field(default_factory=list)  # values after each token of the text
    low: list[int] = dataclasses.field(default_factory=list)  # positions of tokens in few bits
    factor: np.ndarray | None = None  # of the channels of their keys

    def slots(self, rule: Rule) -> list[int | None]:
        """Returns the position in each slot; None for slots of tokens in few bits."""
        return [*self.kept[: rule.sinks], *[None] * math.ceil(len(self.low) / rule.per_slot), *self.kept[rule.sinks :]]


@dataclasses.dataclass
class Rule:
    """A method in numbers. drop: the order, see `priorities`. budgets, recents: per layer, maximum tokens and newest
    ones that always stay."""

    drop: str
    budgets: list[int]
    interval: int
    recents: list[int]
    sinks: int = 0
    whole: bool = True
    once: bool = False
    after: str | None = None  # drop of evictions after the prompt's
    in_cache: bool = False
    window: int = 1
    kernel: int = 5
    pooling: str = "avg"
    lag: int = 1
    chunk: int = 1
    mix: float = 0.1
    noise: Callable | None = None  # (layer, head, query, slot) -> Gumbel noise
    temperature: Callable | None = None  # text position -> temperature
    random: Callable | None = None  # (layer, kv head, text position) -> number
    future: Callable | None = None  # (layer, kv head, text position, length) -> number
    smoothing: float | None = None  # of the threshold above which evicted tokens are merged; None drops all
    measure: Callable | None = None  # heads of all layers -> budgets, when a prompt is complete
    variance: float = 0  # its weight next to the mean weight of the last queries
    low: Callable | None = None  # vector -> the same in few bits; None drops what is not kept
    per_slot: int = 1
    share: float = 0.0
    balance: float = 0.0  # power of the largest magnitude that divides a channel of keys
    probe: Callable | None = None  # context -> tokens after it, whose largest weights are the scores


def pooled(scores: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """Pools scores like avg_pool1d (padded with zeros that count) or max_pool1d (padded with -inf), stride 1."""
    padded = np.pad(scores, kernel // 2, constant_values=0 if pooling == "avg" else -np.inf)
    reduce = np.mean if pooling == "avg" else np.max
    return np.array([reduce(padded[i : i + kernel]) for i in range(len(scores))])


def priorities(drop: str, rule: Rule, layer: int, heads: list[Head], number: int, length: int) -> np.ndarray:
    head = heads[number]

    def observed(head: Head, count: int) -> np.ndarray:
        return np.array([sum(w.get(j, 0.0) for w in head.newest[-count:]) for j in head.kept])

    match drop:
        case "sums":
            return np.array([head.scores[j] for j in head.kept])
        case "sums times values":
            return np.array([head.scores[j] * np.abs(head.values[j]).sum() for j in head.kept])
        case "means":
            return np.array([head.scores[j] / (length - j) for j in head.kept])
        case "last query":
            return np.mean([observed(h, 1) for h in heads], axis=0)
        case "last queries":
            # The window is cut off first, and always stays.
            before = max(len(head.kept) - rule.window, 0)
            scores = observed(head, rule.window)[:before]
            return np.append(pooled(scores, rule.kernel, rule.pooling), np.zeros(len(head.kept) - before))
        case "means and variances":
            moments = window_weights(head, rule.window)
            order = moments.mean(axis=1) + rule.variance * moments.var(axis=1, ddof=1)
            return np.append(pooled(order.mean(axis=0), rule.kernel, rule.pooling), np.zeros(rule.window))
        case "chunks":
            before = max(len(head.kept) - rule.window, 0)
            scores = [pooled(observed(h, rule.window)[:before], rule.kernel, rule.pooling) for h in heads]
            chunks = np.split(np.mean(scores, axis=0), range(rule.chunk, before, rule.chunk))
            means = np.concatenate([np.full(len(chunk), chunk.mean()) for chunk in chunks])
            return np.append(means, np.zeros(len(head.kept) - before))
        case "important, not redundant":
            count = len(head.kept)
            before = max(count - rule.window, 0)
            importance = observed(head, rule.window)[:before]
            importance = pooled(importance / importance.sum(), rule.kernel, rule.pooling)
            keys = np.array([head.stored[j] for j in head.kept])
            keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            cosines = keys @ keys.T
            np.fill_diagonal(cosines, 0)
            for row in cosines:
                if (similar := np.flatnonzero(row > 0.5)).size:
                    row[similar[-1]] = 0  # the newest one is not redundant
            redundancy = softmax(cosines.mean(axis=0))
            return rule.mix * np.append(importance, np.zeros(count - before)) - (1 - rule.mix) * redundancy
        case "norm":
            return -np.array([np.linalg.norm(head.keys[j]) for j in head.kept])
        case "unlike the mean":
            keys = np.array([head.stored[j] for j in head.kept])
            keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            anchor = keys.mean(axis=0)
            return -(keys @ anchor) / np.linalg.norm(anchor)
        case "lag":
            states = [np.array([of[j] for j in head.kept]) for of in (head.stored, head.values)]
            order = np.array(head.kept, float) + len(head.kept)
            for start in range(rule.sinks, len(head.kept) - 2 * rule.lag + 1, rule.lag):
                own, following = slice(start, start + rule.lag), slice(start + rule.lag, start + 2 * rule.lag)
                score = np.zeros(rule.lag)
                for x in states:
                    unit = np.ptp(x[following], axis=0)
                    unit[unit <= 1e-5 * np.abs(x[following]).max(axis=0)] = 1
                    score += softmax(np.std((x[own] - x[following].min(axis=0)) / unit, axis=1, ddof=1))
                order[own] = [np.sum(score < one) for one in score]
            return order
        case "age":
            return np.array(head.kept, float)
        case "random":
            assert rule.random is not None
            return np.array([rule.random(layer, number, j) for j in head.kept])
        case "future":
            assert rule.future is not None
            return np.array([rule.future(layer, number, j, length) for j in head.kept])
    raise ValueError(drop)


def window_weights(head: Head, window: int) -> np.ndarray:
    """Weights [G, W, n] that the last W queries of a prompt gave to the n tokens before them."""
    return np.array([of_query[:, : len(head.apart) - window] for of_query in head.apart[-window:]]).swapaxes(0, 1)


def cake_budgets(layers: list[list[Head]], window: int, budget: int, interval: int) -> list[int]:
    """Budgets of layers by entropy and variance, as the authors' code, in whole intervals of the same sum."""
    length, preferences = len(layers[0][0].apart), []
    left = length - interval * math.ceil(max(length - budget, 0) / interval)
    for heads in layers:
        weights = np.concatenate([window_weights(head, window) for head in heads])
        entropy = -(weights * np.log(weights + 1e-10)).sum()
        preferences.append(entropy * weights.var(axis=1, ddof=1).sum())
    wanted = window + np.array(preferences) / sum(preferences) * len(layers) * (left - window)
    over = np.maximum(wanted - length, 0).sum()
    fits = wanted < length
    wanted = np.minimum(wanted, length) + fits * over / fits.sum()
    gone = one_by_one((length - wanted) / interval, (length - left) // interval, (length - window) // interval)
    return (length - interval * gone).tolist()


def evict(rule: Rule, layer: int, heads: list[Head], length: int, num_prompt: int) -> None:
    count, budget = len(heads[0].slots(rule)), rule.budgets[layer]
    if (rule.whole and length < num_prompt) or (rule.once and length != num_prompt) or count <= budget:
        return
    left = count - rule.interval * math.ceil((count - budget) / rule.interval)
    recent = min(rule.recents[layer], left - rule.sinks)
    num_low, low_slots = len(heads[0].low), 0
    if rule.low is not None:
        low_slots = math.ceil((len(heads[0].kept) + num_low - left) / (rule.per_slot - 1))
        low_slots = min(low_slots, math.floor(rule.share * (left - rule.sinks - recent)))
        count, left = len(heads[0].kept), left - low_slots
    drop, chosen = rule.drop if rule.after is None or length == num_prompt else rule.after, []
    for number in range(len(heads)):
        order = priorities(drop, rule, layer, heads, number, length)
        stay = set(range(rule.sinks)) | set(range(count - recent, count))
        others = sorted((i for i in range(count) if i not in stay), key=lambda i: (-order[i], i))
        chosen.append(sorted(stay | set(others[: left - len(stay)])))
    for head, indices in zip(heads, chosen, strict=True):
        if rule.smoothing is not None:
            merge(head, [head.kept[i] for i in indices], rule.smoothing)
        if rule.low is not None:
            gone = [j for i, j in enumerate(head.kept) if i not in indices]
            if head.factor is None:
                head.factor = np.max([np.abs(head.stored[j]) for j in head.kept], axis=0) ** -rule.balance
            for j in gone:
                head.stored[j] = rule.low(head.stored[j] * head.factor) / head.factor
                head.values[j] = rule.low(head.values[j])
            head.low = (head.low + gone)[max(num_low + len(gone) - rule.per_slot * low_slots, 0) :]
        head.kept = [head.kept[i] for i in indices]
        head.newest = []


def merge(head: Head, kept: list[int], smoothing: float) -> None:
    """Merges the tokens of a head that are not kept as D2O does."""
    gone = [j for j in head.kept if j not in kept]
    unit = {j: head.stored[j] / np.linalg.norm(head.stored[j]) for j in head.kept}
    nearest = {e: max((float(unit[e] @ unit[c]), -c) for c in kept) for e in gone}
    mean = float(np.mean([u for u, _ in nearest.values()]))
    head.threshold = mean if head.threshold is None else smoothing * mean + (1 - smoothing) * head.threshold
    for c in kept:
        merged = {e: np.exp(u) for e, (u, at) in nearest.items() if at == -c and u >= head.threshold}
        total = np.e + sum(merged.values())
        for of in (head.stored, head.values):
            of[c] = (np.e * of[c] + sum(weight * of[e] for e, weight in merged.items())) / total


def run(params, config, tokens, rule: Rule, num_prompt: int):
    """Returns log-probabilities [T, V] after each token, and the positions that each layer and kv head keeps after
    each token; None for slots of tokens in few bits."""

    def f64(a):
        return np.asarray(a, np.float64)

    n, kv, h = config.num_heads, config.num_kv_heads, config.head_dim
    group, states, logprobs, kept = n // kv, [[Head() for _ in range(kv)] for _ in params.layers], [], []

    def add(states, token, t):
        """Adds a token to the states; returns the last layer's output."""
        x = f64(params.embed)[token]
        for index, (p, layer) in enumerate(zip(params.layers, config.layers, strict=True)):
            spec, heads = layer.attention, states[index]
            y = _norm(x, f64(p.attn_norm), config.norm_eps)
            q = (y @ f64(p.w_q).T).reshape(n, h)
            out = np.zeros((n, h))
            for number, head in enumerate(heads):
                head.keys[t] = (y @ f64(p.w_k).T).reshape(kv, h)[number]
                rotated = _rotate(head.keys[t][None], np.array([t]), spec.rope.theta)[0]
                head.stored[t] = head.keys[t] if rule.in_cache else rotated
                head.values[t] = (y @ f64(p.w_v).T).reshape(kv, h)[number]
                head.kept.append(t)
                head.scores[t], weights = 0.0, {}
                at = np.arange(len(head.kept)) if rule.in_cache else np.array(head.kept)
                seen = head.kept + head.low
                head.apart.append(np.zeros((group, len(seen))))
                keys = np.array([head.stored[j] for j in seen])
                keys = _rotate(keys, at, spec.rope.theta) if rule.in_cache else keys
                for g in range(group):
                    who = number * group + g
                    scores = keys @ _rotate(q[who], at[-1], spec.rope.theta) * spec.scale
                    out[who] = softmax(scores) @ np.array([head.values[j] for j in seen])
                    if rule.noise is not None and rule.temperature is not None:
                        slots = np.arange(len(scores))
                        scores = (scores + rule.noise(index, who, t, slots)) / rule.temperature(t)
                    head.apart[-1][g] = softmax(scores)
                    for j, w in zip(seen, softmax(scores), strict=True):
                        before = weights.get(j, 0.0)
                        weights[j] = before + w if rule.probe is None else max(before, w)
                for j, w in weights.items():
                    head.scores[j] += w
                head.newest.append(weights)
                head.weights.append(weights)
            x = x + out.reshape(-1) @ f64(p.w_o).T
            y = _norm(x, f64(p.mlp_norm), config.norm_eps)
            gate = y @ f64(p.w_gate).T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ f64(p.w_up).T)) @ f64(p.w_down).T
        return x

    for t, token in enumerate(tokens):
        x = add(states, token, t)
        head_weights = f64(params.embed if params.head is None else params.head)
        z = _norm(x, f64(params.final_norm), config.norm_eps) @ head_weights.T
        z -= z.max()
        logprobs.append(z - np.log(np.exp(z).sum()))
        if rule.probe is not None and t + 1 == num_prompt:
            apart = copy.deepcopy(states)
            for i, token in enumerate(rule.probe(tokens[:num_prompt])):
                add(apart, token, num_prompt + i)
            for head, other in zip(itertools.chain(*states), itertools.chain(*apart), strict=True):
                seen = other.newest[num_prompt:]
                head.scores = {j: max(weights[j] for weights in seen) for j in head.kept}
        if rule.measure is not None and t + 1 == num_prompt:
            rule.budgets = rule.measure(states)
        for index, heads in enumerate(states):
            evict(rule, index, heads, t + 1, num_prompt)
            for head in heads:
                head.past.append(dict(head.values))
        kept.append([[head.slots(rule) for head in heads] for heads in states])
    return np.array(logprobs), kept, states


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()
