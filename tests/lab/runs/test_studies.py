"""Studies in experiments/ hold together: tables follow from records, and README shows one of them."""

from pathlib import Path

import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.sources import model_path
from ksana_jax.lab.runs import models, patterns
from ksana_jax.lab.runs.config import load
from ksana_jax.lab.runs.report import read_report, write_tables
from ksana_jax.lab.runs.tasks.results import SIMULATED

ROOT = Path(__file__).parents[3]
# Models that a study fetches, trains or quantises first.
MADE = (
    "smollm2",
    "gemma3-270m",
    *(f"runs/siblings/{name}/export" for name in ("plain", "bos", "off_by_one", "learned")),
    *(f"runs/heads/{name}/export" for name in ("mha", "gqa", "mqa", "mha_longer")),
    *(f"runs/heads/{name}_{how}/export" for name in ("gqa", "mqa") for how in ("uptrained", "pooled")),
    *(f"runs/latents/{name}/export" for name in ("mha", "gqa", "mqa", "mla", "mla_converted")),
    *(f"runs/latents/{name}/export" for name in ("hybrid_longer", "gqa_longer")),
    *(f"runs/ksana-{name}/export" for name in ("latent", "hybrid")),
    *(f"runs/spec/{name}" for name in ("target", "aligned/export", "unaligned/export")),
    *(f"runs/weights/{name}.gguf" for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")),
)
# Where a study names heads of layers, which the stand-in of its model does not have.
SHAPES = {"pretrained_duo": ModelConfig(num_layers=30, num_heads=9, num_kv_heads=3)}
# Rows that were measured with code that is gone, which their README says.
GONE = {"two_models": ("pools of 256 and 64",), "routing": ("polled each 1 s", "light servers")}
STUDIES = sorted(records.parent for records in (ROOT / "experiments").glob("*/records.jsonl"))
# Studies by `ksana bench`, whose code has their rows.
BENCHES = {"growth"}


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_table_of_a_study_follows_from_its_records(study, tmp_path):
    write_tables(read_report(study, trusted=None), tmp_path)
    assert (tmp_path / "table.md").read_text() == (study / "table.md").read_text()
    needed = {"README.md", "figure.png", "run.json"} - ({"run.json"} if study.name in BENCHES else set())
    assert needed <= {path.name for path in study.iterdir()}
    shown, caption = (tmp_path / "table.tex").read_text().split(r"\caption")
    assert ("Live KV:" in caption) <= ("live KV" in shown) and ("Bold:" in caption) <= (r"\textbf" in shown)


@pytest.fixture
def forgotten_models():
    """Forgets stand-ins: a path relative to one test's folder is another model in the next one's."""
    yield
    for of_model in (models.training_context, models.num_layers, models.tokenizer_of):
        of_model.cache_clear()


@pytest.mark.parametrize("study", [s for s in STUDIES if s.name not in BENCHES], ids=lambda study: study.name)
def test_a_study_has_the_rows_of_its_configuration(study, tmp_path, monkeypatch, forgotten_models):
    monkeypatch.chdir(tmp_path)
    for name in MADE:  # rows do not depend on what is in a model
        folder = tmp_path / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(model_path("ksana-tiny"))
    if study.name in SHAPES:
        monkeypatch.setattr(patterns, "model_config", lambda model: SHAPES[study.name])
    gone = GONE.get(study.name, ())
    measured = (row for row in read_report(study, trusted=None).rows if not any(name in row.label for name in gone))
    rows = [(row.label.removesuffix(SIMULATED), row.point) for row in measured]
    assert rows == [(row.label, row.point) for row in load(study.name).rows]


def test_every_folder_with_a_readme_is_a_study_or_a_script():
    explained = {readme.parent.name for readme in (ROOT / "experiments").glob("*/README.md")}
    assert explained - {"comparing", "gpu", "training"} == {study.name for study in STUDIES} >= {"quickstart"}
