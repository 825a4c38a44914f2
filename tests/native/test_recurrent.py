"""Recurrent layers in C++: against their definition in float64, against XLA's, and the bits of prompts in parts."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.patterns import FAR
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, ShortConvSpec
from ksana_jax.models.layers import linear
from ksana_jax.models.recurrent import mixer, recurrent_shapes
from ksana_jax.models.text_tokens import TextTokens
from ksana_jax.native.recurrent import Heads, Texts, recur, short_conv
from ksana_jax.ops.native_states import NativeStates
from ksana_jax.ops.recurrent import choose_recurrent
from tests.machine import compiled, no_compiler

pytestmark = [compiled, pytest.mark.usefixtures("each_machine")]
LAYER, SLOTS, LAYERS = 1, 9, 3
# Key heads, heads, key and value dims, kernel: smaller than a register, and a block of columns and a part.
DIMS = {"small": (1, 2, 6, 4, 2), "odd": (2, 4, 19, 45, 4)}
KINDS = {
    "delta": {"delta": True},
    "by channel": {"delta": True, "sigmoid": True},
    "mamba": {"delta": False, "gate_first": True},
}


def texts_of(lengths, slots, padding=3, layer=LAYER):
    """Arrays of a step of texts, the last of which is absent, with padding behind the first one."""
    of_texts = np.full((3, len(lengths) + 1), FAR, np.int32)
    of_tokens = np.full((2, sum(lengths) + padding), 0, np.int32)
    of_tokens[0], of_texts[2], at, places = FAR, 0, 0, []
    for text, (length, (source, target)) in enumerate(zip(lengths, slots, strict=True)):
        places += range(at, at + length)
        of_tokens[0, at : at + length] = text
        of_tokens[1, at : at + length] = np.arange(length)
        of_texts[:, text] = source, target, at + length - 1
        at += length + (padding if text == 0 else 0)
    return Texts(jnp.asarray(of_texts), jnp.asarray(of_tokens), jnp.int32(layer)), places


class Case:
    """Random arguments of a kind of heads for a number of tokens."""

    def __init__(self, kind, dims, dtype, tokens, seed=0):
        rng, (hk, h, k, v, kernel) = np.random.default_rng(seed), dims
        self.dims, self.kind, self.dtype, c = dims, kind, dtype, 2 * hk * k + h * v

        def normal(*shape, dtype="float32"):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        self.given, widths = normal(tokens, c, dtype=dtype), (hk * k, hk * k, h * v)
        self.taps = [normal(n, 1, kernel, dtype=dtype) for n in widths]
        self.bias = normal(c, dtype=dtype) if kind == "mamba" else None
        # From nearly no decay to one after which nothing is left.
        decay = jnp.exp(-jnp.exp(normal(tokens, h, k if kind == "by channel" else 1) * 2 - 2))
        self.heads = Heads(
            *(decay, jax.nn.sigmoid(normal(tokens, h)), normal(tokens, h * v)),
            normal(h * v if kind == "mamba" else v, dtype=dtype),
            1e-3,
            hk if kind == "mamba" else h,
            skip=normal(h) if kind == "mamba" else None,
            **KINDS[kind],
        )
        pools = normal(SLOTS, LAYERS, kernel - 1, c, dtype=dtype), normal(SLOTS, LAYERS, h, k, v)
        self.pools = tuple(np.asarray(x) for x in pools)

    def run(self, texts, tokens, pools):
        """Runs the tokens of indices; -1 for padding, which gets large numbers."""

        def of(x):
            padded = jnp.where(np.reshape(tokens, (-1, *[1] * (x.ndim - 1))) < 0, jnp.asarray(7e3, x.dtype), x[tokens])
            return padded

        heads = self.heads._replace(**{name: of(getattr(self.heads, name)) for name in ("decay", "beta", "gate")})
        run = jax.jit(lambda given, pools: recur(given, self.taps, self.bias, heads, pools, texts))
        y, pools = run(of(self.given), tuple(map(jnp.asarray, pools)))
        return np.asarray(y, np.float32), tuple(map(np.asarray, pools))

    def defined(self, tokens, conv, matrix):
        """Rows and states of one text in float64, from its states."""
        (hk, h, k, v, _), heads, rows = self.dims, self.heads, []
        conv, matrix = np.array(conv, np.float64), np.array(matrix, np.float64)
        taps = np.concatenate([np.asarray(w, np.float64)[:, 0] for w in self.taps])

        def rounded(x):
            return np.asarray(jnp.asarray(x, self.dtype), np.float64)

        for token in tokens:
            conv = np.concatenate([conv, np.asarray(self.given[token], np.float64)[None]])
            x = rounded((conv * taps.T).sum(0) + (0 if self.bias is None else np.asarray(self.bias, np.float64)))
            x, conv = x / (1 + np.exp(-x)), conv[1:]
            q, key = (np.repeat(part.reshape(hk, k), h // hk, 0) for part in np.split(x[: 2 * hk * k], 2))
            value, beta = x[2 * hk * k :].reshape(h, v), np.asarray(heads.beta[token], np.float64)[:, None]
            if heads.delta:
                q, key = (part / np.sqrt((part**2).sum(1, keepdims=True) + 1e-6) for part in (q, key))
                q /= np.sqrt(k)
            matrix *= np.broadcast_to(np.float64(heads.decay[token]), (h, k))[:, :, None]
            u = beta * (value - heads.delta * np.einsum("hkv,hk->hv", matrix, key))
            matrix += key[:, :, None] * u[:, None]
            out, gate = np.einsum("hkv,hk->hv", matrix, q), np.float64(heads.gate[token]).reshape(h, v)
            gate = 1 / (1 + np.exp(-gate)) * (1 if heads.sigmoid else gate)
            if heads.gate_first:
                out = (out + np.asarray(heads.skip, np.float64)[:, None] * value) * gate
            out = out.reshape(heads.groups, -1)
            out /= np.sqrt((out**2).mean(1, keepdims=True) + heads.eps)
            out = out.reshape(h, v) * np.broadcast_to(np.asarray(heads.norm, np.float64).reshape(-1, v), (h, v))
            rows.append((out * (1 if heads.gate_first else gate)).reshape(-1))
        return np.array(rows), conv, matrix


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_those_of_float64(kind, dims, dtype):
    lengths, slots = (5, 1, 17), ((2, 2), (FAR, 4), (5, 6))
    case, (texts, places) = Case(kind, DIMS[dims], dtype, sum(lengths)), texts_of(lengths, slots)
    tokens = np.full(texts.of_tokens.shape[1], -1)
    tokens[places] = np.arange(sum(lengths))
    y, pools = case.run(texts, tokens, case.pools)
    assert not y[tokens < 0].any()
    expected_pools, start = [np.array(pool) for pool in case.pools], 0
    for length, (source, target) in zip(lengths, slots, strict=True):
        before = [pool[source, LAYER] if source < SLOTS else 0 * pool[0, 0] for pool in case.pools]
        rows, *after = case.defined(range(start, start + length), *before)
        # A rounding of the model's type in the end; in float32, sums of up to 64 products and 17 tokens.
        tolerance: Any = {"rtol": 2.0**-8, "atol": 1e-5} if dtype == "bfloat16" else {"rtol": 0, "atol": 1e-5}
        spread = rows.std()
        found = y[places][start : start + length]
        np.testing.assert_allclose(found / spread, rows / spread, **tolerance)
        for pool, state in zip(expected_pools, after, strict=True):
            pool[target, LAYER] = state
        start += length
    np.testing.assert_array_equal(pools[0], expected_pools[0])
    np.testing.assert_allclose(pools[1], expected_pools[1], rtol=0, atol=1e-5 * expected_pools[1].std())
    untouched = np.ones((SLOTS, LAYERS), bool)
    untouched[[2, 4, 6], LAYER] = False
    np.testing.assert_array_equal(pools[1][untouched], case.pools[1][untouched])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_cut_of_a_prompt_gives_the_same_bits(kind, dtype):
    length = 23
    case = Case(kind, DIMS["odd"], dtype, length, seed=1)
    [whole], _ = [case.run(texts_of((length,), ((FAR, 3),), padding=0)[0], np.arange(length), case.pools)], None
    for cut in range(1, length):
        pools, rows, after = case.pools, [], []
        for part, slot in ((np.arange(cut), FAR), (np.arange(cut, length), 3)):
            y, pools = case.run(texts_of((len(part),), ((slot, 3),), padding=0)[0], part, pools)
            rows.append(y)
            after.append(pools)
        np.testing.assert_array_equal(np.concatenate(rows), whole[0])
        for found, expected in zip(pools, whole[1], strict=True):
            np.testing.assert_array_equal(found, expected)
        # In one step, with the state between both kept.
        texts, places = texts_of((2, cut, length - cut), ((1, 1), (FAR, 6), (6, 3)), padding=0)
        y, pools = case.run(texts, np.array([0, 1, *range(length)]), case.pools)
        np.testing.assert_array_equal(y[places[2:]], whole[0])
        for found, between, expected in zip(pools, *after, strict=True):
            np.testing.assert_array_equal(found[[6, 3], LAYER], [between[3, LAYER], expected[3, LAYER]])
    # One by one, next to another text, from a slot to another and back.
    pools, rows = case.pools, []
    for token in range(length):
        source, target = (FAR, 4, 5)[min(token, 1) + (token > 0 and token % 2 == 0)], (4, 5)[token % 2]
        texts, places = texts_of((2, 1), ((1, 1), (source, target)), padding=0)
        y, pools = case.run(texts, np.array([0, 1, token]), pools)
        rows.append(y[places[-1:]])
    np.testing.assert_array_equal(np.concatenate(rows), whole[0])
    np.testing.assert_array_equal(pools[1][4, LAYER], whole[1][1][3, LAYER])


SPECS = {
    "short conv": ShortConvSpec((0, 1, 2), 3, bias=True),
    "delta": DeltaRuleSpec((0, 1, 2), 2, 4, 16, 24, beta_factor=2.0),
    "kimi": DeltaRuleSpec((0, 1, 2), 4, 4, 16, 24, rank=12),
    "mamba": Mamba2Spec((0, 1, 2), 2, 4, 16, 24, eps=1e-3),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", [5, 4], ids=["apart", "continuing"])
@pytest.mark.parametrize("kind", SPECS)
def test_layers_are_those_of_xla(kind, source, dtype):
    rng, spec, d, lengths = np.random.default_rng(2), SPECS[kind], 40, (4, 1, 30)
    numbers = {name: rng.standard_normal(shape) / 4 for name, shape in recurrent_shapes(d, spec).items()}
    wide = ("log_decay", "b_decay", "skip")
    weights = {name: jnp.asarray(x, "float32" if name in wide else dtype) for name, x in numbers.items()}
    absent = dict.fromkeys(("b_conv", "b_conv_q", "w_in", "w_qkv", "w_beta", "skip", "w_decay_a", "w_out_gate_a"))
    p, (texts, places) = SimpleNamespace(**absent | weights), texts_of(lengths, ((2, 2), (FAR, 4), (source, 6)))
    x = jnp.asarray(rng.standard_normal((texts.of_tokens.shape[1], d)), dtype)
    pool = {
        name: jnp.asarray(rng.standard_normal((SLOTS, LAYERS, *shape)), own or dtype)
        for name, (shape, own) in spec.state(d).items()
    }
    continues = jnp.array([False, False, source == 4, False])
    (source, target, last), (text, nth) = texts.of_texts, texts.of_tokens
    mix, tokens = mixer(p, spec, linear), TextTokens(text, nth, last, continues)

    def by_xla(x, pool):
        before = {name: a.at[source, LAYER].get(mode="fill", fill_value=0) for name, a in pool.items()}
        out, after = mix.advance(*mix.project(x), before, tokens)
        return out, {name: a.at[target, LAYER].set(after[name], mode="drop") for name, a in pool.items()}

    def in_place(x, pool):
        return mix.advance(*mix.project(x), NativeStates(pool, LAYER, (source, target), tokens), tokens)

    (out, after), (expected, wanted) = jax.jit(in_place)(x, pool), jax.jit(by_xla)(x, pool)
    found, expected = (np.asarray(o, np.float32)[places] for o in (out, expected))
    # In bfloat16, convolutions that round to the other side of a tie change all that follows.
    tolerance = 1e-5 if dtype == "float32" else 2.0**-6
    assert abs(found - expected).max() <= tolerance * max(1, abs(expected).max()) and expected.std() > 0.01
    for name, state in wanted.items():
        assert abs(np.asarray(state - after[name], np.float32)).max() <= tolerance * abs(np.asarray(state)).max()
    lines = jax.jit(in_place, donate_argnums=1).lower(x, pool).compile().as_text().splitlines()
    shapes = [str(list(a.shape)).replace(" ", "") for a in pool.values()]
    assert not [line for line in lines if " copy(" in line and any(shape in line for shape in shapes)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_cut_of_a_short_convolution_gives_the_same_bits(dtype):
    rng, d, length = np.random.default_rng(3), 300, 9
    x, gate, taps = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((length, d), (length, d), (d, 1, 4)))
    pool = jnp.asarray(rng.standard_normal((SLOTS, LAYERS, 3, d)), dtype)

    def run(part, slot, pool):
        return short_conv(x[part], gate[part], taps, None, pool, texts_of((len(part),), ((slot, 3),), padding=0)[0])

    whole, after = run(np.arange(length), 7, pool)
    for cut in range(1, length):
        first, between = run(np.arange(cut), 7, pool)
        second, found = run(np.arange(cut, length), 3, between)
        np.testing.assert_array_equal(np.concatenate([first, second]), whole)
        np.testing.assert_array_equal(found, after)


def test_arguments_that_do_not_fit_each_other_are_refused():
    case: Any = Case("mamba", DIMS["odd"], "float32", 4)
    texts, _ = texts_of((4,), ((1, 1),), padding=0)
    arguments: Any = {name: getattr(case, name) for name in ("given", "taps", "bias", "heads", "pools")}

    def refused(match, error: Any = ValueError, **changed):
        with pytest.raises(error, match=match):
            recur(**arguments | {"texts": texts} | changed)

    for name in ("decay", "beta", "gate", "norm", "skip"):
        wrong = getattr(case.heads, name)
        refused(name, heads=case.heads._replace(**{name: jnp.pad(wrong, [(0, 1)] * wrong.ndim)}))
    refused("groups", heads=case.heads._replace(groups=3))
    refused("inputs", given=case.given[:, 1:])
    refused("k taps", taps=[case.taps[0], case.taps[1][1:], case.taps[2]])
    refused("the bias", bias=case.bias[1:])
    refused("pools", pools=(case.pools[0][1:], case.pools[1]))
    refused("of_tokens", texts=texts._replace(of_tokens=texts.of_tokens[:, 1:]))
    refused("must be float32 or bfloat16", NotImplementedError, given=case.given.astype("float16"))


def test_xla_serves_other_platforms_and_types():
    spec = SPECS["mamba"]
    assert choose_recurrent("gpu", "float32", spec).load() is None
    assert choose_recurrent("cpu", "float16", spec).load() is None
    assert no_compiler or choose_recurrent("cpu", "bfloat16", spec).load() is NativeStates
