"""`ksana plan`: quick help, one line for an error, and JSON as the last line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax import cli
from ksana_jax.runner.planner import report, solve
from tests.loading.models_on_disk import write_config
from tests.runner.planner.models import FOLDER, STEP

ROOT = Path(__file__).parents[3]
LLAMA = FOLDER / "llama-2-7b"


@pytest.fixture
def ready_step(monkeypatch):
    """Nothing is compiled: the tests set a step's bytes."""
    monkeypatch.setattr(solve, "measure_step", lambda *_, **__: STEP)


def ksana_plan(capsys, *flags, code=0, **options):
    """Standard output and standard error of `ksana plan`; options as keywords, their values as they are typed."""
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(SystemExit) as raised:
        cli.main(["plan", *given, *flags])
    assert raised.value.code == code
    return capsys.readouterr()


def test_the_last_line_is_one_object_with_the_figures(capsys, ready_step):
    asked = {"model": LLAMA, "device": "a100-80g", "dtype": "bf16"}
    *lines, last = ksana_plan(capsys, "--json", **asked).out.splitlines()
    found = json.loads(last)
    assert found["weights_bytes"] == 13_476_831_232
    assert found["kv_bytes_per_token"] == 512 * 1024
    for name in ("alpha_bytes_per_request", "max_kv_tokens", "max_batch", "max_context"):
        assert isinstance(found[name], int) and found[name] > 0
    assert lines == ksana_plan(capsys, **asked).out.splitlines()
    assert max(map(len, lines)) <= 80


def test_options_reach_the_plan(capsys, ready_step):
    asked = {"dtype": "bf16", "batch": 4, "context": 8192, "window": 1024, "num_sinks": 4}
    asked |= {"embedding_device": "host", "memory_fraction": 0.8}
    out = ksana_plan(capsys, "--json", model=LLAMA / "config.json", device="48GiB", **asked).out
    found = json.loads(out.splitlines()[-1])
    assert (asked | {"prefix_share": 0.0}).items() <= found["request"].items()
    assert found["max_context"] == 2**30 - 1 and "memory sets no limit" in out
    assert "window 1,024 + 4 sinks" in out and "250.0 MiB more on the host" in out
    stored = {"kv_dtype": "int8", "kv_full_precision_layers": "[0, 2]", "kv_eviction": "{method: h2o, budget: 0.2}"}
    out = ksana_plan(capsys, "--json", model="ksana-tiny", device="cpu", **stored).out
    found = json.loads(out.splitlines()[-1])
    assert found["request"]["kv_eviction"] == {"method": "h2o", "budget": 0.2} and "h2o, budget 0.2" in out
    assert found["request"]["kv_full_precision_layers"] == [0, 2] and "largest window" not in out
    # Two layers in float32 and two in int8 with a scale, of two heads of 64; and a score for each layer and head.
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2 + 2 * 2 * 2 * (64 + 4) + 4 * 2 * 4
    out = ksana_plan(capsys, "--json", model="ksana-tiny", device="cpu", prefix_share=0.5).out
    assert json.loads(out.splitlines()[-1])["request"]["prefix_share"] == 0.5


def test_a_plan_for_several_devices_says_that_each_holds_all_latents(capsys, ready_step):
    asked = {"model": ROOT / "tests/golden/deepseek_v3-latent-experts-tied", "device": "cpu"}
    one, two = (ksana_plan(capsys, "--json", **asked, tensor_parallel_size=n).out for n in (1, 2))
    assert "each of 2 x cpu, which divide the model but not its latents: " in two
    assert len({json.loads(out.splitlines()[-1])["kv_bytes_per_token"] for out in (one, two)}) == 1


def test_latents_are_counted_beside_what_keys_and_values_of_all_heads_would_take(capsys, ready_step, tmp_path):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = json.loads((ROOT / "tests/golden/youtu-latent-tied/config.json").read_text()) | sizes
    config |= {"num_attention_heads": 128, "num_key_value_heads": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = ksana_plan(capsys, "--json", model=tmp_path, device="cpu", dtype="bf16").out
    # DeepSeek V3's sizes; 2 bytes per number.
    assert "1,152 bytes of a latent; expanded keys and values: 81,920." in one
    found, layers = json.loads(one.splitlines()[-1]), config["num_hidden_layers"]
    assert (found["kv_bytes_per_token"], found["expanded_bytes_per_token"]) == (1_152 * layers, 81_920 * layers)


def test_a_model_larger_than_the_device_is_one_line_with_the_numbers(capsys, ready_step):
    shown = ksana_plan(capsys, "--json", code=2, model=LLAMA, device="8GiB")
    found = json.loads(shown.out.splitlines()[-1])
    assert (found["max_batch"], found["max_context"], found["max_kv_tokens"]) == (0, 0, 0)
    assert shown.err == (
        "ksana: error: llama-2-7b does not fit on 8 GiB: weights take 12.55 GiB, a step of 1 request 287.1 MiB, "
        "of 7.20 GiB (memory_fraction 0.9)\n"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "gtx"}, "device is 'gtx', must be one of h200, h100, a100-80g"),
        ({"dtype": "fp8"}, "dtype is 'fp8', must be one of f32, bf16, f16"),
        ({"model": "nowhere"}, "there is no model 'nowhere'; supported: a directory or .gguf file"),
        ({"model": str(ROOT)}, "config.json is missing"),
        ({"window": "0"}, "window is 0, must be an integer from 1"),
        ({"embedding_device": "host"}, "output head too (tied)"),
        ({"kv_eviction": "{method: h20}"}, "kv_eviction method is 'h20'"),
        ({"kv_eviction": "{method: h2o}", "prefix_share": "0.5"}, "kv_eviction moves the tokens of shared blocks"),
        ({"kv_eviction": "{method: h2o}", "window": "64"}, "without a layer of full attention"),
        ({"kv_full_precision_layers": "[0]"}, 'needs another kv_cache_dtype than "auto"'),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(capsys, changed, message):
    error = ksana_plan(capsys, code=2, **{"model": "ksana-tiny", "device": "h200"} | changed).err
    assert error.count("\n") == 1 and error.startswith("ksana: error: ") and message in error


def test_buckets_are_listed_with_what_each_takes(capsys, tmp_path, ready_step):
    write_config(tmp_path / "tiny")
    settings = {"dtype": "f32", "batch": 2, "context": 64, "max_num_batched_tokens": 32}
    report.main(tmp_path / "tiny", "1GiB", buckets=True, as_json=True, **settings)
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    # One and two tokens alone in their rows; the most of those with narrow tiles, or a wide one; one width of tables.
    tiles = [[1, 8], [1, 32], [4, 8]]
    assert [b["parts"] for b in found["buckets"]] == [[[1, 1]], [[2, 1]], *([[2, 1], tile] for tile in tiles)]
    sizes = [b["network_bytes"] for b in found["buckets"]]
    assert sizes[0] < sizes[1] < min(sizes[2:])
    assert all(b["table_width"] == 4 and b["sampling_bytes"] > 0 for b in found["buckets"])
    assert "Memory of a step by bucket" in out


def test_help_answers_without_jax():
    code = (
        "import sys\nfrom ksana_jax.cli import main\n"
        "try: main(['plan', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'jax', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    assert "--prefix-share" in done.stdout and "--buckets" in done.stdout


def test_several_models_are_planned_awake_and_asleep(capsys, ready_step):
    asked = {"dtype": "bf16", "batch": 2, "context": 512}
    other = ("--model", str(FOLDER / "llama-34m"))
    alone = [
        json.loads(ksana_plan(capsys, "--json", model=model, device="cpu", **asked).out.splitlines()[-1])
        for model in (LLAMA, FOLDER / "llama-34m")
    ]
    for device, stays in (("cpu", 1), ("a100-80g", 0)):
        printed = ksana_plan(capsys, *other, "--json", model=LLAMA, device=device, **asked).out
        found = json.loads(printed.splitlines()[-1])
        assert found["all_awake"] == sum(own["total_bytes"] for own in alone)
        assert found["least"] == alone[0]["total_bytes"] + stays * alone[1]["weights_bytes"]
        assert f"--device-memory-bytes {found['least']} or more" in printed.replace("\n", " ")
    failed = ksana_plan(capsys, *other, model=LLAMA, device="1GiB", code=2, **asked)
    assert "the largest model does not fit on 1 GiB while the others sleep" in failed.err
    failed = ksana_plan(capsys, *other, model=LLAMA, device="cpu", dtype="bf16", code=2)
    assert "2 models are given, so batch must be too" in failed.err
    failed = ksana_plan(capsys, *other, "--buckets", model=LLAMA, device="cpu", code=2, **asked)
    assert "--buckets is of one model, 2 are given" in failed.err
