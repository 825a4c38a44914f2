"""The setting `device`: how it may be written, one spelling of each value, and one clear error for each mistake."""

import dataclasses

import pytest

from ksana_jax import EngineConfig
from ksana_jax.core.config import ConfigError
from ksana_jax.core.device_setting import FEATURES, DeviceTarget, canonical_device
from ksana_jax.devices.features import Features
from ksana_jax.lab.runs.config import plan

OWN = {"platform": "npu", "plugin": "own.plugin:register"}


@pytest.mark.parametrize(
    "given, plain",
    [
        (None, None),
        ("auto", None),
        ("npu", {"platform": "npu"}),
        ("NPU", {"platform": "npu"}),
        ({"platform": "npu", "plugin": "installed", "options": {}}, {"platform": "npu"}),
        (OWN, OWN),
        ({**OWN, "donation": False, "memory_bytes": 5}, {**OWN, "donation": False, "memory_bytes": 5}),
        ({"platform": "npu", "features": {"generator": "rbg"}}, {"platform": "npu", "features": {"generator": "rbg"}}),
    ],
)
def test_each_value_has_one_spelling(given, plain):
    assert canonical_device(given) == plain
    assert EngineConfig(device=given).device == plain
    assert canonical_device(plain) == plain


@pytest.mark.parametrize(
    "given, message",
    [
        (3, "device is 3, must be a platform's name or a mapping with a platform"),
        ({"plugin": "installed"}, "device has no platform"),
        ({"platform": "n p u"}, "device.platform is 'n p u', must be a name such as npu"),
        ({"platform": "npu", "plug": "installed"}, "device has no field 'plug'; the nearest is 'plugin'"),
        ({"platform": "npu", "plugin": "here"}, "device.plugin is 'here', must be installed, the path of a library"),
        ({"platform": "npu", "plugin": "/none/a.so"}, "device.plugin is /none/a.so, and there is no such file"),
        ({**OWN, "platform": "cpu"}, "device.platform is 'cpu', jax's own name"),
        ({"platform": "npu", "options": {"a": 1}}, "by its path or as 'package.module:function': an installed"),
        ({**OWN, "donation": "yes"}, "device.donation is 'yes'"),
        ({**OWN, "memory_bytes": 0}, "device.memory_bytes is 0"),
        ({**OWN, "features": {"loops": True}}, "device.features has loops: True; there are dynamic_loops .True or"),
        ({**OWN, "features": {"generator": "philox"}}, "'philox'; there are .* generator .threefry or rbg"),
    ],
)
def test_a_mistake_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(device=given)


def test_an_override_writes_the_setting_as_yaml():
    override = 'engine.device={platform: npu, plugin: "own.plugin:register"}'
    made = plan({"task": "perplexity", "model": "ksana-tiny"}, [override])
    assert [trial.config["engine"]["device"] for trial in made.trials] == [OWN]


def test_the_names_of_features_are_theirs():
    assert list(FEATURES) == [field.name for field in dataclasses.fields(Features)]


def test_a_target_is_shown_with_its_plugin():
    assert [str(DeviceTarget("npu")), str(DeviceTarget(**OWN))] == ["npu", "npu (own.plugin:register)"]
