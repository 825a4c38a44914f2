"""Settings of every test: the CPU, compiled steps kept between runs, and the same hypothesis examples each time."""

import asyncio
import dataclasses
import gc
import inspect
import json
import os
import signal
import threading
import zlib
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

from ksana_jax.core import processor
from ksana_jax.core.compilation_cache import keep_compiled_steps
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.disk import failpoints
from tests import compiling, loopback, mappings, unchanged
from tests.loopback.openxla import DEVICE as PLUGIN

# The same examples in every run; `pytest --hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


# The setting `device` as JSON, for a run of the tests on another device than the CPU.
DEVICE = "KSANA_TEST_DEVICE"
# Rooms whose tests compile steps: nine tenths of the time of all.
TAKE_LONG = tuple(
    f"tests/{room}/"
    for room in "engine lab/runs loading methods models native pallas_kernels runner serve sharding training".split()
)
LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="K/N", help="runs the K-th of N parts of the tests that were chosen")
    parser.addoption("--shard-files", metavar="K/N", help="the same in whole files, whose tests share programs")
    parser.addoption("--shard-cases", metavar="K/N", help="of what is compiled for an absent GPU, the K-th of N parts")
    parser.addoption("--drawn", metavar="K/N", help="of the tests in rooms that take long, the K-th of N parts")
    parser.addoption("--changed", action="store_true", help="leaves out long tests that no changed file can affect")
    parser.addoption("--device", help="runs the tests on another device: loopback, plugin, or `device` as JSON")


def pytest_configure(config):
    every = not config.getoption("--changed") or config.args != config.getini("testpaths")  # paths that are named run
    config.stash[LEFT_OUT] = [] if every else unchanged.unchanged(unchanged.changed_files())
    if config.getoption("markexpr") != "soak" and not (config.getoption("--device") or DEVICE in os.environ):
        compiling.use_quick()
    try:
        if config.getoption("numprocesses", None):  # each of xdist's processes takes another core
            processor.hidden()
        else:
            processor.hide(core=int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None
    if given := config.getoption("--device"):
        named = {"loopback": json.dumps(loopback.setting(pinned_host=True)), "plugin": json.dumps(PLUGIN)}
        os.environ[DEVICE] = named.get(given, given)
    if setting := os.environ.get(DEVICE):
        _start(json.loads(setting))
    # Environment variables rather than jax.config: they reach the commands that tests start, and jax stays unimported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if getattr(config, "cache", None) is not None:  # pytest -p no:cacheprovider
        keep_compiled_steps(Path(config.cache.mkdir("jax")))
        os.environ.setdefault("KSANA_PROGRAMS_DIR", str(config.cache.mkdir("ksana") / "programs"))
    else:
        os.environ.setdefault("KSANA_PROGRAMS", "off")
    gc.disable()  # while tests are collected, of whose objects none is garbage: a quarter of the time it takes


def _start(setting):
    from ksana_jax.devices.starting import use_device

    use_device(setting)


def pytest_ignore_collect(collection_path, config):
    if str(collection_path.relative_to(config.rootpath)) in config.stash[LEFT_OUT]:
        return True
    if (shard := config.getoption("--shard-files")) and collection_path.name.startswith("test_"):
        return None if _is_of(str(collection_path.relative_to(config.rootpath)), shard) else True


def _is_of(name, shard):
    """Whether a test, file, or case is in a part: by its name, so that it stays there whatever others there are."""
    number, of = map(int, shard.split("/"))
    return zlib.crc32(name.encode()) % of == number - 1


def pytest_collection_modifyitems(config, items):
    if shard := config.getoption("--shard"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_of(item.nodeid, shard)])
        items[:] = [item for item in items if _is_of(item.nodeid, shard)]
    if drawn := config.getoption("--drawn"):
        left = [item for item in items if item.nodeid.startswith(TAKE_LONG) and not _is_of(item.nodeid, drawn)]
        config.hook.pytest_deselected(items=left)
        left_out = set(left)
        items[:] = [item for item in items if item not in left_out]
    if DEVICE in os.environ:
        for item in items:
            if mark := item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason=f"about CPUs: {mark.args[0]}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is a coroutine in an event loop of its own."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
        return True


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--shard"):
        session.exitstatus = pytest.ExitCode.OK  # a small part may be empty


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


def pytest_report_header(config):
    device = os.environ.get(DEVICE, os.environ["JAX_PLATFORMS"])
    without = ", ".join(processor.hidden())
    on = f"jax {version('jax')}, jaxlib {version('jaxlib')} on {device}" + f" without {without}" * bool(without)
    left_out = config.stash[LEFT_OUT]
    return [on, *([f"left out, as no changed file affects them: {', '.join(left_out)}"] if left_out else [])]


@pytest.fixture
def case_chosen(request):
    """Whether a case of the compiler report is in the part that `--shard-cases` names; None where it names none."""
    shard = request.config.getoption("--shard-cases")
    return shard and (lambda case: _is_of(str(case), shard))


@pytest.fixture(autouse=True)
def ctrl_c():
    """Gives each test Python's own handling of Ctrl-C: a shell starts background jobs with SIGINT ignored."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Frees compiled programs after a module's tests if the process has many."""
    yield
    if mappings.are_many():
        import jax

        from tests.engine import small

        small.forget_programs()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def default_compiler():
    """Lets processes that tests start compile as users do."""
    with pytest.MonkeyPatch.context() as patch:
        for name, flags in compiling.default().items():
            patch.setenv(name, flags)
        yield


@pytest.fixture
def run_ksana(capsys):
    """Runs the command `ksana` in this process; returns its exit status and what it printed on stdout and stderr."""
    from ksana_jax import cli

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def no_failpoints():
    """Disarms what a test has armed."""
    yield
    failpoints.disarm()


@pytest.fixture(scope="module")
def quick_compiles():
    """XLA optimises little and compiles large programs in half the time: for tests that compare numbers to rounding."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # the setting is not part of a program's key


@pytest.fixture(scope="module")
def few_shapes():
    """Engines of a module have one bucket of each kind, so at most three shapes of steps: compiling is what tests wait
    for. `tests/engine/test_invariances.py` has all buckets."""
    from ksana_jax.engine import build
    from ksana_jax.scheduler.step.ladders import make_buckets

    def coarsest(*settings):
        buckets = make_buckets(*settings)
        return dataclasses.replace(
            buckets, decodes=buckets.decodes[-1:], tiles=buckets.tiles[-1:], widths=buckets.widths[-1:]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_buckets", coarsest)
        yield
