"""Programs on the loopback: values against NumPy, donation, several devices, and what is said about a program."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
# Name, function of jax.numpy or NumPy.
FUNCTIONS = {
    "matmul": lambda np, x: x @ x.T,
    "sort": lambda np, x: np.sort(x, axis=-1),
    "argmax": lambda np, x: np.argmax(x, axis=-1),
    "cumsum": lambda np, x: np.cumsum(x, axis=0),
    "where": lambda np, x: np.where(x > 0, x, -x),
    "softmax": lambda np, x: np.exp(x) / np.sum(np.exp(x), axis=-1, keepdims=True),
    "take": lambda np, x: x[np.asarray([3, 1, 15]), np.asarray([0, 2, 4])],
    "cholesky": lambda np, x: np.linalg.cholesky(x @ x.T + 16 * np.eye(16, dtype=np.float32)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_numpys(name):
    function = FUNCTIONS[name]
    computed = jax.jit(functools.partial(function, jnp))(X)
    assert computed.devices() == {jax.devices()[0]}
    np.testing.assert_allclose(computed, function(np, X), rtol=1e-4, atol=1e-5)


def test_a_loop_of_dynamic_length_ends_where_it_should():
    found = jax.jit(lambda n: jax.lax.while_loop(lambda i: i * i < n, lambda i: i + 1, 0))(1000)
    assert int(found) == 32


def test_random_bits_are_those_of_the_cpu():
    here = jax.random.bits(jax.random.key(3), (64,))
    with jax.default_device(jax.devices("cpu")[0]):
        there = jax.random.bits(jax.random.key(3), (64,))
    np.testing.assert_array_equal(np.asarray(here), np.asarray(there))


def test_scatter_drops_what_is_beyond_the_end():
    pool = jax.jit(lambda x, at: x.at[at].set(7.0, mode="drop"))(jnp.zeros(4), jnp.array([1, 4, 9]))
    np.testing.assert_array_equal(pool, [0, 7, 0, 0])


def test_a_donated_array_is_gone_and_its_memory_is_the_results():
    device = jax.devices()[0]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    before = jax.device_put(np.zeros(100_000, np.float32))
    pointer, in_use = before.unsafe_buffer_pointer(), device.memory_stats()["bytes_in_use"]
    after = add(before)
    assert before.is_deleted()
    assert after.unsafe_buffer_pointer() == pointer
    assert device.memory_stats()["bytes_in_use"] == in_use
    assert float(after[0]) == 1


def test_an_array_that_is_read_twice_is_not_taken_over():
    add = jax.jit(lambda x, y: (x + 1, y + 1), donate_argnums=0)
    x, y = jax.device_put(X), jax.device_put(X)
    add(x, y)
    assert x.is_deleted() and not y.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), X)


def test_a_program_says_what_it_takes_and_can_be_kept():
    compiled = jax.jit(lambda x: (x @ x, jnp.sum(x))).lower(X).compile()
    memory, [cost] = compiled.memory_analysis(), [compiled.cost_analysis()]
    assert memory.argument_size_in_bytes == X.nbytes and memory.output_size_in_bytes >= X.nbytes + 4
    assert cost["flops"] >= 2 * 16**3
    assert "ENTRY" in compiled.as_text()
    kept = serialize_executable.serialize(compiled)
    again = serialize_executable.deserialize_and_load(*kept, execution_devices=jax.devices()[:1])
    for a, b in zip(again(X), compiled(X)):
        np.testing.assert_array_equal(a, b)


def test_an_unknown_option_of_the_compiler_is_an_error_and_the_process_lives():
    function = jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True})
    for _ in range(3):
        with pytest.raises(Exception, match="xla_no_such_option"):
            # The temporary is destroyed while the exception is pending.
            function(jnp.ones(4) + 1)
    assert float(jnp.ones(3).sum()) == 3


@pytest.mark.parametrize("way", ["jit", "shard_map"])
def test_two_devices_compute_together(way):
    mesh = Mesh(np.array(jax.devices()), "d")
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    if way == "jit":
        total = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=NamedSharding(mesh, P()))(x)
    else:
        add = jax.shard_map(
            lambda x: jax.lax.psum(jnp.sum(x, axis=0), "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False
        )
        total = jax.jit(add)(x)
    assert total.devices() == set(jax.devices())
    np.testing.assert_allclose(np.asarray(total), X.sum(axis=0), rtol=1e-5)


def test_a_function_runs_on_the_second_device_alone():
    second = jax.devices()[1]
    function = jax.jit(lambda x: x * 2)
    function(jax.device_put(X))
    there = function(jax.device_put(X, second))
    assert there.devices() == {second}
    np.testing.assert_array_equal(np.asarray(there), X * 2)


def test_threads_compile_and_run_at_once():
    found = {}

    def work(n):
        found[n] = float(jax.jit(lambda x: jnp.sum(x) * n)(np.ones(n, np.float32)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {n: n * n for n in range(1, 17)}


def test_a_topology_is_refused_because_compiling_for_one_would_wait_forever():
    from jax.experimental import topologies

    with pytest.raises(Exception, match="TopologyDescription_Create is not implemented"):
        topologies.get_topology_desc("any", platform="npu")


def test_what_is_dropped_leaves_no_handle_behind():
    # Imported here: the plugin of this process.
    from ksana_jax.devices.loopback import plugin

    handles = plugin.registered["npu"].handles
    double = jax.jit(lambda x: x * 2)
    double(X).block_until_ready()
    before = len(handles)
    for _ in range(50):
        double(X).block_until_ready()
    assert len(handles) == before
