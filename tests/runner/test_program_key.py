"""Keys of stored programs: everything that changes a program changes its key, or keeps it out of the store."""

import copy
import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core import processor
from ksana_jax.devices.features import Features
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.models import layers, mlp_forms
from ksana_jax.models.frequencies import layer_ropes
from ksana_jax.native import build
from ksana_jax.runner import evicting, movers, program_key
from ksana_jax.runner.compiling import of_shapes
from ksana_jax.runner.decode_loop import LoopKey
from ksana_jax.runner.program_key import Lowering, digest_of
from ksana_jax.runner.value_digest import NotStored, Walk
from ksana_jax.runner.verification import VerificationKey
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from tests.engine.small import make_llm, model

SHAPE = StepShape((TileGroup(4, 1),), 4, 4)
EVICTING: Any = {"kv_eviction": {"method": "h2o", "budget": 16}}


def digest(lowering: Lowering) -> str:
    return digest_of(of_shapes(lowering, {}), Walk())


def lowering(settings: Any) -> Lowering:
    return make_llm(programs={}, **settings).runner._lowering(SHAPE)


@functools.cache
def lowerings() -> dict[str, Lowering]:
    """One of each kind that an engine has."""
    runner: Any = make_llm(programs={}, **EVICTING).runner
    evictor, mover = runner.evictor, runner.mover
    keys = {
        "step": SHAPE,
        "loop": LoopKey(SHAPE, 2, True, None),
        "choice": ("sample", 4, 4, True, False, False, None),
        "score": ("score", 16, 0),
        "verification": VerificationKey(4, None, True, False, None),
    }
    found = {name: runner._lowering(key) for name, key in keys.items()}
    caught = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (evicting, movers):
            patch.setattr(module, "compiled", lambda key, lower: caught.append(lower))
        evictor._function(evicting.lower_evictions, 1, 4)
        evictor._function(evicting.lower_measurements, 1, 4)
        mover._copy(1)
    return found | dict(zip(("eviction", "measurement", "move"), caught, strict=True))


def mutations(x: Any):
    """Yields values that differ from x in one place."""
    if isinstance(x, bool):
        yield not x
    elif x is None:
        yield 1
    elif isinstance(x, int | float):
        yield x + 1
    elif isinstance(x, str):
        yield f"{x}x"
    elif isinstance(x, np.ndarray):
        changed = x.copy()
        changed.flat[-1] += 1
        yield from (changed, x.reshape(1, *x.shape), x.astype(np.float64))
    elif isinstance(x, types.FunctionType):
        yield layers.linear
    elif isinstance(x, tuple):
        make: Any = getattr(type(x), "_make", tuple)
        for n, item in enumerate(x):
            yield from (make((*x[:n], other, *x[n + 1 :])) for other in mutations(item))
        if make is tuple:
            yield from ((*x, None), x[1:]) if x else ((None,),)
    elif isinstance(x, dict):
        for name, item in x.items():
            yield from (x | {name: other} for other in mutations(item))
        yield x | {"another": 1}
    elif isinstance(x, list):
        yield from (list(other) for other in mutations(tuple(x)))
    elif isinstance(x, jax.Device | jax.tree_util.PyTreeDef | type | np.dtype | slice | frozenset):
        yield "another"
    elif isinstance(x, functools.partial):
        yield from (functools.partial(x.func, *x.args, **other) for other in mutations(x.keywords))
        yield functools.partial(x.func, *x.args, 1, **x.keywords)
    elif isinstance(x, types.MethodType):
        yield from (types.MethodType(x.__func__, other) for other in mutations(x.__self__))
    else:
        fields = {field.name for field in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else vars(x)
        assert fields or type(x).__module__.startswith("ksana_jax."), f"a {type(x)} is not changed here"
        for name in fields:
            for other in mutations(getattr(x, name)):
                changed = copy.copy(x)
                object.__setattr__(changed, name, other)
                yield changed


@pytest.mark.parametrize("name", ["step", "loop", "choice", "score", "verification", "eviction", "move"])
def test_every_field_of_every_value_is_in_the_key(name):
    base = lowerings()[name]
    seen = {digest(base)}
    assert digest(Lowering(base.func, *base.args, **base.keywords)) in seen
    number = 0
    for field, value in base.keywords.items():
        for other in mutations(value):
            number += 1
            found = digest(Lowering(base.func, *base.args, **base.keywords | {field: other}))
            assert found not in seen, f"{field} {number}: {other}"
    assert number >= {"step": 200, "loop": 250, "move": 3, "eviction": 5}.get(name, 60)


@pytest.mark.parametrize("name", ["step", "loop", "choice", "score", "verification", "eviction", "move"])
def test_every_array_and_tree_of_the_arguments_is_in_the_key(name):
    base = lowerings()[name]
    seen = {digest(base)}
    leaves, structure = jax.tree.flatten(base.args)
    for n, leaf in enumerate(leaves):
        others = [
            jax.ShapeDtypeStruct((*leaf.shape, 1), leaf.dtype),
            jax.ShapeDtypeStruct(leaf.shape, "int8" if leaf.dtype != np.int8 else "int16"),
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=True),
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        ]
        for other in others:
            args = structure.unflatten([*leaves[:n], other, *leaves[n + 1 :]])
            found = digest(Lowering(base.func, *args, **base.keywords))
            assert found not in seen, f"{n} {other}"
            seen.add(found)
    assert digest(Lowering(base.func, *base.args, None, **base.keywords)) not in seen
    assert digest(Lowering(base.func, *([a] for a in base.args), **base.keywords)) not in seen


def test_static_parts_of_arguments_are_in_the_key():
    base = lowerings()["move"]
    pool, *others = base.args
    changed = dataclasses.replace(pool, codec="int8")
    assert jax.tree.leaves(changed) == jax.tree.leaves(pool)
    assert digest(Lowering(base.func, changed, *others, **base.keywords)) != digest(base)


def test_a_committed_array_is_another_argument_than_one_that_is_not():
    base = lowerings()["move"]
    loose = jnp.zeros(3)
    fixed = jax.device_put(loose, jax.devices()[0])
    of_loose, of_fixed, of_host = (
        digest(Lowering(base.func, x, **base.keywords)) for x in (loose, fixed, np.zeros(3, np.float32))
    )
    assert of_host == of_loose != of_fixed


VARIANTS = {
    "plain": {},
    "more blocks": {"num_blocks": 17},
    "smaller blocks": {"block_size": 8, "num_blocks": 32},
    "bf16": {"dtype": "bf16"},
    "int8 pool": {"kv_cache_dtype": "int8"},
    "int4 pool": {"kv_cache_dtype": "int4"},
    "exact layers": {"kv_cache_dtype": "int8", "kv_full_precision_layers": (0,)},
    "eviction": EVICTING,
    "other eviction": {"kv_eviction": {"method": "snapkv", "budget": 16}},
    "its numbers": {"kv_eviction": {"method": "snapkv", "budget": 16, "kernel": 3}},
    "selection": {"kv_selection": {"method": "quest", "budget": 32, "full_layers": 1}},
    "products": {"operators": {"linear": "xla"}},
    "attention": {"operators": {"attention": "xla"}},
    "norms": {"operators": {"norm": "xla", "linear": "xla"}},
    "sinks": {"max_repositioned_sinks": 2},
    "int8 weights": {"quantization": "int8"},
    "embedding": {"embedding_device": "host"},
    "adapters": {"enable_lora": True, "max_loras": 2},
}


def test_settings_that_give_other_programs_give_other_keys():
    texts = {}
    for name, settings in VARIANTS.items():
        found = lowering(settings)
        text = [hashlib.sha256(part.as_text().encode()).hexdigest() for part in found.parts(found())]
        texts.setdefault(digest(found), {})[name] = text
    assert all(len({str(text) for text in same.values()}) == 1 for same in texts.values()), texts
    assert len(texts) >= len(VARIANTS) - 1


def test_a_longer_context_that_changes_frequencies_changes_the_key():
    base = lowerings()["step"]
    network = base.keywords["network"]
    rope: Any = model()[0].rope
    config = dataclasses.replace(model()[0], rope=dataclasses.replace(rope, theta=5e5))
    changed = dataclasses.replace(network, ropes=layer_ropes(config, 64))
    assert digest(Lowering(base.func, *base.args, **base.keywords | {"network": changed})) != digest(base)


def test_equal_ropes_that_layers_do_not_share_change_the_key():
    base = lowerings()["step"]
    network = base.keywords["network"]
    first, *others = network.ropes
    assert all(other is first for other in others)
    changed = dataclasses.replace(network, ropes=(first, *(type(first)(*other) for other in others)))
    assert changed.rope_kinds != network.rope_kinds
    assert digest(Lowering(base.func, *base.args, **base.keywords | {"network": changed})) != digest(base)


@pytest.fixture
def same():
    """Returns True as long as the key of a program stays the same."""
    base = lowerings()["move"]
    expected = digest(base)
    return lambda: digest(base) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_matmul_precision", "float32"),
        ("jax_debug_nans", True),
        ("jax_disable_most_optimizations", not jax.config.values["jax_disable_most_optimizations"]),
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_enable_x64", True),
        ("jax_optimization_level", "O1"),
        ("jax_use_shardy_partitioner", False),
    ],
)
def test_settings_of_jax_are_in_the_key(name, value, same):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert not same()
    finally:
        jax.config.update(name, before)
    assert same()


def test_settings_of_jax_for_a_block_of_code_are_in_the_key(same):
    with jax.default_matmul_precision("bfloat16"):
        assert not same()
    with jax.enable_x64(True):
        assert not same()
    with jax.default_device(jax.devices()[0]):
        assert not same()
    assert same()


@pytest.mark.parametrize("name", ["XLA_FLAGS", "TF_XLA_FLAGS"])
def test_what_xla_reads_from_the_environment_is_in_the_key(name, same, monkeypatch):
    monkeypatch.setenv(name, f"{os.environ.get(name, '')} --xla_cpu_enable_fast_math=true")
    assert not same()


def test_versions_machine_and_library_are_in_the_key(same, monkeypatch):
    for library in program_key.LIBRARIES:
        with monkeypatch.context() as patch:
            patch.setattr(program_key, "version", lambda name, other=library: "0" if name == other else "1")
            program_key._versions.cache_clear()
            assert not same(), library
    program_key._versions.cache_clear()
    assert same()
    for place, name in ((processor, "_features"), (program_key, "platform_of"), (program_key, "machine")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *_: "another")
            assert not same()
    with monkeypatch.context() as patch:
        patch.setattr(build, "was_asked", lambda: True)
        patch.setattr(build, "why_missing", lambda: "no compiler")
        assert not same()
        patch.setattr(build, "why_missing", lambda: None)
        patch.setattr(build, "library", lambda: Path("another-library.so"))
        assert not same()


def test_all_sources_of_the_package_are_in_the_key(same, monkeypatch, tmp_path):
    files = program_key._source_files()
    names = {name for name, _ in files}
    assert {"ksana_jax/runner/network.py", "ksana_jax/native/linear.cc", "pallas_kernels/contract.py"} <= names
    edited = tmp_path / "network.py"
    edited.write_text("# edited")
    os.utime(edited, (1, 1))
    for others in ([*files[1:]], [("ksana_jax/runner/network.py", edited), *files]):
        monkeypatch.setattr(program_key, "_source_files", lambda others=others: others)
        monkeypatch.setattr(program_key, "has_edits", lambda: False)
        program_key.sources.cache_clear()
        assert not same()
    program_key.sources.cache_clear()
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(program_key, "started_s", files[0][1].stat().st_ctime)
        with pytest.raises(NotStored, match="edited after this process had started"):
            same()


def test_another_process_finds_the_same_key():
    script = "from tests.runner.test_program_key import *; print({n: digest(x) for n, x in lowerings().items()})"
    run = functools.partial(
        subprocess.run, [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    found = [run(env=os.environ | {"PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert found[0].stdout == found[1].stdout and len(found[0].stdout) > 400, found[0].stderr


@dataclasses.dataclass(frozen=True)
class Mine(EvictionMethod):
    def priority(self, cached, xp):
        return cached.keys


def test_code_outside_the_package_is_not_stored():
    base = lowerings()["eviction"]
    with pytest.raises(NotStored, match="test_program_key:Mine is code outside the package"):
        digest(Lowering(base.func, *base.args, method=Mine(budget=8)))
    for code in (lambda x: x, digest, functools.partial(digest, base)):
        with pytest.raises(NotStored, match="outside the package"):
            digest(Lowering(base.func, method=code))


def test_values_that_cannot_be_known_are_not_stored():
    for value in (jnp.zeros(3), np.array([object()]), object(), iter([]), sys):
        with pytest.raises(NotStored):
            digest(Lowering(movers.lower_move, value=value))
    loop = []
    loop.append(loop)
    with pytest.raises(NotStored, match="contains itself"):
        digest(Lowering(movers.lower_move, value=loop))


def test_attributes_beside_the_fields_of_a_dataclass_count():
    one, other = Features(), Features()
    object.__setattr__(other, "_read_from_a_file", 1.0)
    assert Walk()(one) != Walk()(other)


def test_closures_of_the_package_differ_by_what_they_close_over():
    gated: Any = mlp_forms.gated
    one, same, other = (gated(function).apply for function in (jax.nn.silu, jax.nn.silu, jax.nn.relu))
    assert Walk()(one) == Walk()(same) != Walk()(other)
