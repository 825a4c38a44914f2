"""The groups of checks, each a function that runs in a process on the device and yields findings."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ksana_jax.core.compilation_cache import WRITES_ALL
from ksana_jax.devices.capabilities import capabilities, features, stored_as_bits
from ksana_jax.devices.platforms import platform_of
from ksana_jax.lab.device_check.findings import Finding, tried
from ksana_jax.lab.device_check.operations import OPERATIONS, WITHOUT, error_of
from ksana_jax.native.callers import why_not_called

TRANSFERRED = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32")
TRANSFERRED += ("float8_e4m3fn", "float8_e5m2")


def identity() -> Iterator[Finding]:
    device = jax.devices()[0]
    client: Any = device.client
    name = platform_of(device)
    itself = "" if device.platform == name else f", whose client calls itself {device.platform}"
    yield Finding("platform", None, f"{name} ({device.device_kind}), {jax.device_count()} devices{itself}")
    yield Finding("version", None, " ".join(str(client.platform_version).split()))
    minor = getattr(client, "pjrt_c_api_minor_version", None)
    yield Finding("PJRT C API", None, "none: built into jaxlib" if minor is None else f"0.{minor}")
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    yield Finding("memories", None, f"{', '.join(kinds)}; the default one is {device.default_memory().kind}")
    found = capabilities()
    yield Finding("copies to the host cross", None, found.staging)
    yield Finding("computes on the host's memory", None, "yes" if found.shares_host_memory else "no")


def memory() -> Iterator[Finding]:
    device, found = jax.devices()[0], capabilities()
    if found.shares_host_memory:
        yield Finding("memory", None, "the host's, which the engine asks the system for")
        return

    def stats() -> str:
        reported = device.memory_stats()
        assert reported and reported.get("bytes_limit"), f"memory_stats() is {reported}"
        return f"{reported['bytes_limit']:,} bytes"

    yield tried("memory_stats", stats, "memory_fraction needs device.memory_bytes; peaks are not known")
    limit = found.memory_bytes
    if limit is None:
        return

    def refused() -> str:
        try:
            jax.device_put(np.zeros(1, np.uint8)).block_until_ready()
            jax.jit(lambda: jnp.zeros(limit + 4096, jnp.uint8))().block_until_ready()
        except Exception as error:
            assert "RESOURCE_EXHAUSTED" in str(error), error
        else:
            raise AssertionError("an array of more than the memory was made")
        assert float(jnp.ones(3).sum()) == 3
        return "RESOURCE_EXHAUSTED, and the device works on"

    yield tried("an array beyond the memory is refused", refused, "a step beyond the memory may end the process")


def transfers() -> Iterator[Finding]:
    def there_and_back(values: np.ndarray) -> None:
        back = np.asarray(jax.device_put(values))
        assert back.dtype == values.dtype
        np.testing.assert_array_equal(back, values)

    for name in TRANSFERRED:
        values = (np.arange(12).reshape(3, 4) % 2).astype(np.dtype(getattr(ml_dtypes, name, name)))
        yield tried(name, lambda values=values: there_and_back(values), "settings that store it cannot be used")
    shapes = {"scalars": np.float32(3), "empty arrays": np.zeros((0, 4), np.int32)}
    shapes["strided arrays"] = np.arange(24)[::2].astype(np.int32)
    for name, values in shapes.items():
        yield tried(name, lambda values=values: there_and_back(values))


def donation() -> Iterator[Finding]:
    def told() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # jax warns that it does not
            jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(4))

    yield tried("jax tells the device of it", told, "set device.donation if the plugin supports it")

    def taken_over() -> str:
        assert capabilities().donates, "the argument is still there"
        return "the argument is gone"

    yield tried("an argument's memory is the result's", taken_over, "a step has the pool twice, and is planned so")
    bits = "bfloat16" in stored_as_bits(jax.devices()[0])
    yield Finding(
        "a pool of bfloat16 is stored as", None, "uint16: a scatter would convert all of it" if bits else "it is"
    )


def operations() -> Iterator[Finding]:
    for name in OPERATIONS:
        yield tried(name, lambda name=name: error_of(name), WITHOUT.get(name, ""))
    found = features(jax.devices()[0])
    yield Finding("random numbers of sampling", None, found.generator)
    yield Finding("the engine does without", None, "; ".join(found.missing) or "nothing")


def programs() -> Iterator[Finding]:
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()

    def sized() -> str:
        found = compiled.memory_analysis()
        assert found is not None, "memory_analysis() is None"
        return f"{found.argument_size_in_bytes} bytes of arguments"

    def cost() -> str:
        found: Any = compiled.cost_analysis()
        assert found and "flops" in found, f"cost_analysis() is {found}"
        return f"{found['flops']:g} operations"

    def kept() -> None:
        again = serialize_executable.deserialize_and_load(
            *serialize_executable.serialize(compiled), execution_devices=jax.devices()[:1]
        )
        np.testing.assert_array_equal(again(jnp.ones((8, 8))), np.full((8, 8), 8.0))

    def cached() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, value in {**WRITES_ALL, "jax_compilation_cache_dir": folder}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            jax.jit(lambda x: x @ x + 1).lower(jnp.ones((8, 8))).compile()
            assert any(Path(folder).iterdir()), "nothing was written"

    yield tried("memory_analysis", sized, "num_blocks or memory_bytes, instead of memory_fraction")
    yield tried("cost_analysis", cost, "traces lack the operations of programs")
    yield tried("as_text", lambda: f"{len(compiled.as_text() or ''):,} characters", "traces lack the programs' text")
    yield tried("serialisation", kept, "each start compiles")
    yield tried("jax's compilation cache", cached, "each start compiles: jax keeps programs of some platforms only")


def running() -> Iterator[Finding]:
    def unknown_option() -> str:
        try:
            jax.jit(lambda x: x + 1, compiler_options={"no_such_option": True})(jnp.ones(4) + 1)
        except Exception as error:
            return type(error).__name__
        raise AssertionError("it was ignored")

    def threads() -> None:
        found: dict[int, float] = {}

        def work(n: int) -> None:
            found[n] = float(jax.jit(lambda x: jnp.sum(x) * n)(np.ones(n, np.float32)))

        started = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        assert found == {n: n * n for n in range(1, 9)}, found

    def copied() -> None:
        array = jnp.arange(1000)
        array.copy_to_host_async()
        np.testing.assert_array_equal(np.asarray(array), np.arange(1000))

    yield tried("an unknown compiler option is an error", unknown_option, "the engine gives none on this platform")
    yield tried("threads that compile and run at once", threads, "give requests from one thread")
    yield tried("copy_to_host_async", copied)


def devices() -> Iterator[Finding]:
    first = jax.devices()[0]

    def has_cpu() -> None:
        values = np.arange(6, dtype=np.float32)
        there = jax.device_put(jax.device_put(values, jax.devices("cpu")[0]), first)
        np.testing.assert_array_equal(np.asarray(there), values)

    yield tried("jax's CPU next to it", has_cpu)
    if jax.device_count() < 2:
        yield Finding("a second device", None, "there is one device")
        return

    def collective() -> None:
        mesh = Mesh(np.array(jax.devices()), "d")
        x = jax.device_put(np.ones((jax.device_count(), 4), np.float32), NamedSharding(mesh, P("d")))
        total = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=NamedSharding(mesh, P()))(x)
        np.testing.assert_array_equal(np.asarray(total), np.full(4, jax.device_count()))

    def across() -> None:
        there = jax.device_put(jax.device_put(np.arange(6), first), jax.devices()[1])
        np.testing.assert_array_equal(np.asarray(there), np.arange(6))

    yield tried("copies to a second device", across)
    yield tried("a sum over all devices", collective, "one device")


def optional() -> Iterator[Finding]:
    unused = "the engine does not use it"

    def callback() -> None:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        jax.jit(lambda: jax.pure_callback(lambda: np.float32(1), shape))().block_until_ready()

    def wide() -> None:
        with jax.enable_x64(True):
            assert np.asarray(jax.jit(lambda x: x * 2)(np.ones(3))).dtype == np.float64

    def called() -> None:
        if reason := why_not_called(platform_of()):
            raise NotImplementedError(reason)

    yield tried("custom calls into C++", called, "native attention, products and norms are left to XLA")
    yield tried("callbacks to Python", callback, unused)
    yield tried("dlpack", lambda: jax.dlpack.from_dlpack(jnp.ones(3)).shape, unused)
    yield tried("float64", wide, unused)


def tokens() -> Iterator[Finding]:
    """Eight greedy and eight seeded tokens of ksana-tiny; the report compares them with the CPU's."""
    from ksana_jax.core.request import SamplingParams
    from ksana_jax.engine.llm import LLM

    llm = LLM("ksana-tiny", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=32, num_blocks=32)
    seeded = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    for name, settings in {"greedy": {"temperature": 0.0}, "seeded": seeded}.items():
        params = SamplingParams(max_tokens=8, ignore_eos=True, **settings)

        def generated(params: SamplingParams = params) -> list[int]:
            [output] = llm.generate("def main(", params)
            return list(output.outputs[0].token_ids)

        yield tried(f"{name} tokens of ksana-tiny", generated)


GROUPS: dict[str, Callable[[], Iterator[Finding]]] = {
    "identity": identity,
    "memory": memory,
    "transfers": transfers,
    "donation": donation,
    "operations": operations,
    "programs": programs,
    "running": running,
    "devices": devices,
    "optional": optional,
    "tokens": tokens,
}
