"""`ksana_jax.extend` keeps what plug-ins use: its names, fields, methods and parameters are those of its version."""

import dataclasses
import inspect
import json
from importlib import import_module
from pathlib import Path

from ksana_jax import extend

STORED = Path(__file__).parents[1] / f"golden/extend_v{extend.VERSION}.json"


def parameters(function):
    """Returns names of parameters, with = where there is a default."""
    return [
        name + "=" * (parameter.default is not parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def surface():
    """Returns what an implementation can read of each interface."""
    found = {}
    for name in sorted(set(extend.__all__) - {"EXTENSION_POINTS", "VERSION", "ExtensionPoint"}):
        interface = getattr(extend, name)
        if not isinstance(interface, type) or interface is dict:
            found[name] = str(interface)
            continue
        fields = [f.name for f in dataclasses.fields(interface)] if dataclasses.is_dataclass(interface) else []
        fields += getattr(interface, "_fields", ())
        methods = {
            key: parameters(value)
            for base in reversed(interface.__mro__)
            if base.__module__.startswith("ksana_jax")
            for key, value in vars(base).items()
            if inspect.isfunction(value) and not key.startswith("_")
        }
        found[name] = {"fields": fields, "methods": methods}
    return found


def test_interfaces_are_those_of_their_version():
    """A name, field, method or parameter that goes breaks plug-ins: raise VERSION and write a new file. One that is
    added with a default does not: write the file again, `python -m tests.extend.test_surface`."""
    assert surface() == json.loads(STORED.read_text())


def test_extension_points_name_interfaces_and_registries_that_exist():
    for point in extend.EXTENSION_POINTS:
        module, name = point.registry.split(":")
        assert len(getattr(import_module(module), name)) >= 1 and hasattr(extend, point.interface)
    assert set(extend.__all__) <= set(dir(extend))


if __name__ == "__main__":
    STORED.write_text(json.dumps(surface(), indent=1) + "\n")
