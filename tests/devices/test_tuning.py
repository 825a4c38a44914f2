"""What platforms are served with: options of the compiler."""

from ksana_jax.devices.tuning import tuning


def test_steps_of_few_tokens_are_compiled_with_options_of_their_own():
    gpu = tuning("gpu")
    for num_tokens, split in ((1, False), (16, False), (17, True), (4096, True)):
        disabled = gpu.options_of(num_tokens)["xla_disable_hlo_passes"].split(",")
        # A pool counts as if it were there many times; see the comment in the table.
        assert "rematerialization" in disabled and ("splitk-rewriter" not in disabled) == split
    for platform in ("cpu", "tpu", "unknown"):
        assert tuning(platform).options_of(1) == tuning(platform).options_of(4096) == tuning(platform).compiler_options
