"""Starting jax on a device, in child processes: each route to a plugin, and each way in which it can fail."""

import os
import textwrap

import pytest

from ksana_jax.devices.platforms import warn_of_unused_gpu
from ksana_jax.devices.starting import use_device
from tests.devices.children import child
from tests.machine import loopback_plugin


def test_what_cannot_start_is_said_and_another_device_can_be_used_after_it(tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    child(f"""
    with pytest.raises(ConfigError, match="device npu: no installed plugin brings this platform. jax knows .*cpu"):
        use_device("npu")
    with pytest.raises(ConfigError, match=r"device bad .*/broken.so.: the plugin cannot be loaded: .*file too short"):
        use_device({{"platform": "bad", "plugin": "{tmp_path}/broken.so"}})
    with pytest.raises(ConfigError, match="device is tpu, and jax|device tpu: the plugin was found and cannot start"):
        use_device("tpu")
    use_device("cpu")
    import jax
    assert jax.devices()[0].platform == "cpu"
    """)


@loopback_plugin
def test_a_plugin_that_does_not_start_is_not_the_end_of_the_process():
    child("""
    lacking = loopback.setting(lacks=["Client_Create"]) | {"platform": "lame"}
    with pytest.raises(ConfigError, match="device lame .*register.: the plugin was found and cannot start: .*_Create"):
        use_device(lacking)
    use_device("cpu")
    """)


@loopback_plugin
def test_a_library_is_loaded_and_given_its_options():
    child("""
    Loopback("acc")
    setting = {"platform": "acc", "plugin": str(library()), "options": {"memory_bytes": 2**20}}
    use_device(setting)
    import jax
    assert jax.devices()[0].device_kind == "loopback acc (CPU)"
    assert jax.devices()[0].memory_stats()["bytes_limit"] == 2**20
    use_device(setting)
    with pytest.raises(ConfigError, match="a process has one device"):
        use_device("cpu")
    # Donation is an explicit choice for platforms that jax does not list.
    import jax.numpy as jnp
    array = jnp.ones(8)
    with pytest.warns(UserWarning, match="onation is not implemented for"):
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    """)


@loopback_plugin
def test_a_device_is_the_backend_that_was_registered_whatever_it_calls_itself():
    child("""
    Loopback("cpu")
    told = {"donation": False, "features": {"generator": "rbg"}}
    use_device({"platform": "acc", "plugin": str(library()), **told})
    import jax
    from ksana_jax.devices.capabilities import capabilities, features
    from ksana_jax.devices.platforms import platform_of
    device, cpu = jax.devices()[0], jax.devices("cpu")[0]
    assert device.platform == cpu.platform == "cpu" and device.client is not cpu.client
    assert [platform_of(), platform_of(device), platform_of(cpu)] == ["acc", "acc", "cpu"]
    # What it can do is asked of it, and what the setting says of it is not said of jax's CPU.
    assert features(device).generator == "rbg" and features(cpu).generator == "threefry"
    assert not capabilities(device).donates
    assert not capabilities(device).shares_host_memory and capabilities(cpu).shares_host_memory
    """)


@loopback_plugin
def test_an_installed_plugin_is_found_by_its_platform(tmp_path):
    package = tmp_path / "jax_plugins" / "vendor"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        textwrap.dedent("""
        from tests.loopback.wrapper import register

        def initialize():
            register("npu", {})
        """)
    )
    child(
        """
        use_device({"platform": "npu", "donation": True})
        import jax
        import jax.numpy as jnp
        assert started().platform == jax.devices()[0].platform == "npu"
        array = jnp.ones(8)
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert array.is_deleted()
        """,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )


def test_jax_that_has_started_elsewhere_cannot_be_moved():
    import jax

    jax.devices()
    use_device(None)
    use_device("cpu")
    for setting in ("npu", {"platform": "npu", "plugin": "own.plugin:register"}):
        with pytest.raises(ValueError, match="jax has already started on cpu"):
            use_device(setting)


@pytest.mark.parametrize(
    ("platform", "asked", "driver", "warned"),
    [("cpu", "", True, True), ("cpu", "cpu", True, False), ("gpu", "", True, False), ("cpu", "", False, False)],
)
def test_an_engine_on_a_cpu_next_to_a_gpu_says_so(tmp_path, monkeypatch, caplog, platform, asked, driver, warned):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    (tmp_path / "version").write_text("NVRM") if driver else None
    warn_of_unused_gpu.__wrapped__(platform, tmp_path / "version")
    assert ("jax sees only its CPU" in caplog.text) == warned
