"""Options of the compiler for the steps of a network, by platform."""

import dataclasses
from types import SimpleNamespace

from ksana_jax.devices.tuning import tuning
from ksana_jax.runner.network import Network


def options_of(platform, num_tokens):
    """Returns the options with which a step is jitted."""
    placement = SimpleNamespace(jit=lambda function, *, options, **others: options)
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Network))
    network = Network(**fields | {"tuning": tuning(platform), "placement": placement})
    return network.jit_donating(print, 1, num_tokens)


def test_steps_of_few_tokens_are_compiled_with_options_of_their_own():
    for num_tokens, split in ((1, False), (16, False), (17, True), (4096, True)):
        disabled = options_of("gpu", num_tokens)["xla_disable_hlo_passes"].split(",")
        # A pool counts as if it were there many times; see the comment in the table.
        assert "rematerialization" in disabled and ("splitk-rewriter" not in disabled) == split
    for platform in ("cpu", "tpu", "unknown"):
        assert options_of(platform, 1) == options_of(platform, 4096) == tuning(platform).compiler_options
