"""Adapters of models with recurrent layers: the same as the matrices added to the checkpoint's."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ksana_jax import LLM, LoRARequest, SamplingParams
from ksana_jax.core.errors import LoadError
from ksana_jax.loading.adapter import CONFIG, PREFIX, WEIGHTS, modules_of, read_adapter
from tests.engine.test_states import PROMPTS, SMALL
from tests.golden.cases import golden_case

SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, logprobs=0, detokenize=False)
NAMES = {
    "lfm2-gqa-conv-tied": {"conv.in_proj", "conv.out_proj", "self_attn.q_proj", "feed_forward.w2"},
    "qwen3_next-gated-delta-experts": {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"},
    "granitemoehybrid-mamba-dense-tied": {"mamba.in_proj", "mamba.out_proj", "shared_mlp.input_linear"},
    "olmo_hybrid-delta-tied": {"linear_attn.q_proj", "linear_attn.a_proj", "linear_attn.g_proj", "mlp.down_proj"},
}


def write(folder, weights: dict[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}))
    save_file({PREFIX + name: w for name, w in weights.items()}, folder / WEIGHTS)


def scores(output) -> list[float]:
    new = [s[t].logprob for s, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)]
    ids = output.prompt_token_ids
    return [output.prompt_logprobs[t][ids[t]].logprob for t in range(1, len(ids))] + new


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_equals_the_sum_of_its_matrices_and_the_model(name, tmp_path):
    folder, rng = golden_case(name).model_dir, np.random.default_rng(2)
    shutil.copytree(folder, tmp_path / "merged")
    llm = LLM(str(folder), **SMALL, enable_lora=True, max_loras=2, max_lora_rank=4)
    [file] = (tmp_path / "merged").glob("*.safetensors")
    merged, weights = load_file(file), {}
    modules = modules_of(llm.engine.model)
    assert NAMES[name] <= {re.sub(r".*layers\.\d+\.", "", module) for module in modules}
    for module, found in modules.items():
        a, b = rng.normal(0, 0.2, (3, found.columns)), rng.normal(0, 0.2, (found.rows, 3))
        weights |= {f"{module}.lora_A.weight": a.astype("f4"), f"{module}.lora_B.weight": b.astype("f4")}
        merged[f"{module}.weight"] = (merged[f"{module}.weight"] + 2 * b @ a).astype("f4")
    save_file(merged, file)
    write(tmp_path / "adapter", weights)
    requests = [LoRARequest("all", 1, str(tmp_path / "adapter")), None]
    both = llm.generate(prompt_token_ids=PROMPTS[4:6], sampling_params=SCORED, lora_request=requests)
    [plain] = llm.generate(prompt_token_ids=PROMPTS[5:6], sampling_params=SCORED)
    [expected] = LLM(str(tmp_path / "merged"), **SMALL).generate(prompt_token_ids=PROMPTS[4:5], sampling_params=SCORED)
    for output, alone in zip(both, (expected, plain), strict=True):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        np.testing.assert_allclose(scores(output), scores(alone), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "module"),
    [("qwen3_5-gated-delta-tied", "linear_attn.conv1d"), ("qwen3_next-gated-delta-experts", "mlp.experts.down_proj")],
)
def test_other_matrices_of_recurrent_models_are_refused_by_name(name, module, tmp_path):
    weights = {f"model.layers.0.{module}.lora_{part}.weight": np.ones((3, 3), "f4") for part in "AB"}
    write(tmp_path / "adapter", weights)
    with LLM(str(golden_case(name).model_dir), **SMALL) as llm, pytest.raises(LoadError, match=f"{module}.* no linear"):
        read_adapter(tmp_path / "adapter", llm.engine.model, "f32", 8)
