"""A vendor's attention is a package: an entry point adds it to the implementations that the engine chooses from."""

import os
import textwrap

import pytest

from tests.devices.children import child
from tests.machine import loopback_plugin

MODULE = """
from ksana_jax.ops.attention import ragged_paged_attention
from ksana_jax.ops.kv_write import write
from ksana_jax.ops.implementations import Implementation, PagedAttention

calls = []

def attend(*args, **keywords):
    calls.append(1)
    return ragged_paged_attention(*args, **keywords)

def unsupported(needs):
    return None if needs.platform == "npu" else f"needs an NPU, this is {needs.platform}"

TOY = Implementation("toy", lambda: PagedAttention(write, attend), unsupported)
"""


@pytest.fixture
def package(tmp_path):
    """Environment of a child that has the package."""
    (tmp_path / "toy_attention.py").write_text(MODULE)
    information = tmp_path / "toy_attention-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-attention\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[ksana_jax.attention]\ntoy = toy_attention:TOY\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


@loopback_plugin
def test_an_installed_package_serves_the_device_that_it_is_for(package):
    child(
        """
        from ksana_jax import LLM, SamplingParams
        import toy_attention
        device = loopback.setting()
        llm = LLM("ksana-tiny", max_model_len=128, max_num_seqs=1, max_num_batched_tokens=16, device=device)
        assert llm.runner.implementation.name == "toy"
        [output] = llm.generate("def main(", SamplingParams(temperature=0, max_tokens=8))
        assert output.outputs[0].token_ids == [266, 946, 504, 409, 283, 3, 262, 390]
        assert toy_attention.calls
        """,
        **package,
    )


def test_elsewhere_it_is_not_chosen_and_says_why(package, tmp_path):
    child(
        """
        from ksana_jax import EngineConfig
        from ksana_jax.ops.implementations import choose, example_needs, explain
        assert EngineConfig(operators={"attention": "toy"}).operators.attention == "toy"
        assert choose(example_needs()).name != "toy"
        assert explain()[0] == ("toy", False, "needs an NPU, this is cpu")
        with pytest.raises(ValueError, match="operators.attention 'toy': needs an NPU, this is cpu"):
            choose(example_needs(), "toy")
        """,
        **package,
    )
    (tmp_path / "toy_attention.py").write_text(textwrap.dedent("TOY = 3\n"))
    child(
        """
        from ksana_jax.ops.implementations import choose, example_needs
        with pytest.raises(ConfigError, match="entry point toy = toy_attention:TOY of ksana_jax.attention is no"):
            choose(example_needs())
        """,
        **package,
    )
