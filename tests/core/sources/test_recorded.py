"""What records and servers know of a model of the hub, beside its name."""

import json

import pytest

from ksana_jax.core.sources import hub, model_path
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.identity import recorded_config
from ksana_jax.lab.runs.models import fingerprint, num_layers, tokenizer_of, training_context
from ksana_jax.runner.planner.solve import read_model
from ksana_jax.serve.router.proxy.running import _tokenizes
from tests.core.sources.hub_cache import COMMIT, LATER, model_files, write_snapshot

REPO = "someone/some-model"
CACHED = (num_layers, tokenizer_of, training_context)


@pytest.fixture(autouse=True)
def nothing_remembered():
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def tiny():
    return model_files(model_path("ksana-tiny"))


def trial(**more):
    [found] = plan({"task": "perplexity", "model": REPO, "settings": {"num_texts": 1, "num_tokens": 64}, **more}).trials
    return found


def test_a_trial_records_the_commit_beside_the_digest(cache, tiny):
    write_snapshot(cache, REPO, tiny)
    inputs = trial().config["inputs"]
    assert inputs["model"] == fingerprint("ksana-tiny")["model"] and inputs["model_commit"] == COMMIT
    assert "model_commit" not in fingerprint("ksana-tiny")


def test_a_commit_with_the_same_files_makes_no_other_trial(cache, tiny, monkeypatch):
    write_snapshot(cache, REPO, tiny)
    first = trial()
    monkeypatch.setattr(hub, "_commits", {})
    write_snapshot(cache, REPO, tiny, LATER)
    second = trial()
    assert second.config["inputs"]["model_commit"] == LATER and second.id == first.id
    assert recorded_config({"config": json.loads(json.dumps(first.config))}) == recorded_config(
        {"config": second.config}
    )
    config = json.loads(tiny["config.json"]) | {"rms_norm_eps": 0.1}
    write_snapshot(cache, REPO, tiny | {"config.json": json.dumps(config).encode()}, LATER)
    assert trial().id != first.id


def test_context_tokenizer_and_plan_of_a_model_of_the_hub_need_no_weights(cache, tiny):
    del tiny["model.safetensors"]
    write_snapshot(cache, REPO, tiny, revision="v1")
    name = f"{REPO}@v1"
    assert (training_context(name), num_layers(name)) == (training_context("ksana-tiny"), num_layers("ksana-tiny"))
    assert tokenizer_of(name).encode("def main(") == tokenizer_of("ksana-tiny").encode("def main(")
    assert read_model(name)[1] == name
    assert trial(model=name, load_format="dummy").config["inputs"]["model_commit"] == COMMIT


def test_a_name_that_a_server_gives_is_not_downloaded(cache, tiny, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    asked, original = [], huggingface_hub.snapshot_download

    def snapshot_download(repo, **options):
        asked.append(options.get("local_files_only"))
        return original(repo, **options)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert _tokenizes(REPO, download=False) is None and asked == [True]
    write_snapshot(cache, REPO, tiny)
    assert _tokenizes(REPO, download=False) is not None and asked == [True, True]
