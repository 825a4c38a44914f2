"""Transfers between host and device: one vector each way per step, which holds every array bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.runner.transfer import Packing, packed
from tests.engine.small import make_llm

ARRAYS = {
    "ids": np.arange(-3, 3, dtype=np.int32),
    "none": None,
    "scales": np.array([[0.1, -0.0], [np.inf, np.nan]], np.float32),
    "seeds": np.array([[2**32 - 1, 0]], np.uint32),
    "empty": np.zeros((2, 0), np.float32),
}


def bits(arrays):
    return [x.tobytes() for x in jax.tree.leaves(arrays)]


def test_a_vector_has_the_bits_of_its_arrays_on_host_and_device():
    packing = Packing(ARRAYS)
    vector = packing.pack(ARRAYS)
    assert vector.dtype == np.int32 and vector.shape == (packing.size,) == (12,)
    np.testing.assert_array_equal(jax.jit(packed)(ARRAYS), vector)
    on_device = jax.jit(packing.unpack)(vector)
    for found in (packing.unpack(vector), on_device):
        assert jax.tree.structure(found) == jax.tree.structure(ARRAYS) and bits(found) == bits(ARRAYS)


def test_arrays_may_be_shorter_than_their_places_and_the_last_ones_missing():
    packing = Packing((jnp.zeros((4, 2)), jnp.zeros(3)))
    given = np.ones((2, 2), np.float32)
    found, _ = packing.unpack(packing.pack((given, None)))
    np.testing.assert_array_equal(found[:2], given)
    with pytest.raises(AssertionError, match="other than 32 bits"):
        Packing(np.zeros(2, np.float16))


@pytest.fixture
def sent(monkeypatch):
    """Sizes of the arrays that compiled functions, or jax itself, have been given from the host."""
    sent, call, put = [], jax.stages.Compiled.__call__, jax.device_put

    def count(arguments):
        sent.extend(x.size for x in jax.tree.leaves(arguments) if isinstance(x, np.ndarray | np.generic))

    monkeypatch.setattr(jax.stages.Compiled, "__call__", lambda self, *a, **k: (count((a, k)), call(self, *a, **k))[1])
    monkeypatch.setattr(jax, "device_put", lambda x, *a, **k: (count(x), put(x, *a, **k))[1])
    return sent


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}, {"temperature": 0, "logprobs": 2}],
    ids=["greedy", "sampled", "log-probabilities"],
)
def test_a_step_takes_one_vector_to_the_device_and_one_to_the_host(params, sent):
    llm, steps, fetched = make_llm(), [], []
    runner, submit = llm.runner, llm.runner.submit

    def watched(step):
        sent.clear()
        pending = submit(step)
        steps.append((step, list(sent)))
        cells = [getattr(cell.cell_contents, "__self__", None) for cell in pending.fetch.__closure__]
        fetched.append(jax.tree.leaves([vars(x) for x in cells if hasattr(x, "vector")]))
        return pending

    runner.submit = watched
    asked = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **params)
    for _ in range(2):  # the first time compiles
        steps.clear()
        fetched.clear()
        llm.generate([{"prompt_token_ids": list(range(2, 7 + extra))} for extra in range(3)], asked)
    assert len(steps) > 4
    for (step, sizes), vectors in zip(steps, fetched, strict=True):
        assert sizes == [runner.packed(step.shape, step.arrays).size]
        assert [x.dtype for x in vectors if isinstance(x, jax.Array)] == [np.int32]
