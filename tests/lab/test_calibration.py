"""`ksana calibrate`: what it measures, the file, how methods find it, and what records say of it."""

import dataclasses

import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.cli import main
from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.plugins import resolve
from ksana_jax.core.sources import model_path
from ksana_jax.core.statistics import default_file, read_statistics
from ksana_jax.kv.codecs.registry import find_sealing
from ksana_jax.lab.calibration import KINDS
from ksana_jax.lab.calibration.levels import _histogram, _means
from ksana_jax.lab.runs.config import plan
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.statistics import with_statistics
from ksana_jax.models.params import init_params
from tests.engine.small import VOCAB, model

TEXT = "def lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n" * 20

# Scores of heads need longer texts, see tests/models/test_retrieval.py.
MEASURED = sorted(KINDS.keys() - {"duoattention"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and the cache folder of a user who has measured ksana-tiny on it."""
    found = tmp_path_factory.mktemp("calibration")
    (found / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(found))
        sizes = "--num-tokens", "128", "--num-texts", "1"
        for kind in MEASURED:
            with pytest.raises(SystemExit, match=r"^0$"):
                main(["calibrate", "ksana-tiny", "--text", str(found / "text.txt"), "--for", kind, *sizes])
    return found


@pytest.fixture
def home(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_the_file_says_where_its_numbers_come_from(home):
    digest = digest_of_files(model_path("ksana-tiny"))
    shapes = {
        "expected_attention": {"mean": (8, 8, 32), "covariance": (8, 8, 32, 32)},
        "kvquant": {f"{side}{bits}": (2**bits,) for side in "kv" for bits in (2, 3, 4)},
        "qfilter": {"filters": (8, 2, 32)},
    }
    for kind in MEASURED:
        found = read_statistics(default_file(kind, digest), kind, digest)
        assert (found.model, found.num_tokens % 128, len(found.sha256)) == (digest, 0, 64) and "jax" in found.versions
        assert {name: x.ndim for name, x in found.arrays.items()} == {n: len(s) for n, s in shapes[kind].items()}
        assert all(np.isfinite(x).all() for x in found.arrays.values())


@pytest.mark.parametrize("kind", MEASURED)
def test_layers_that_read_another_layers_keys_have_queries_and_no_levels(kind):
    config, params = model()
    config = dataclasses.replace(config, kv_layers=(0, 0))
    params = init_params(config, seed=3, std=0.5)
    measured = resolve(kind, KINDS, "--for")(params, config, np.random.default_rng(0).integers(2, VOCAB, (2, 64)))
    assert all(np.isfinite(x).all() for x in measured.values())
    assert kind == "kvquant" or {len(x) for x in measured.values()} == {2}


def test_a_method_finds_its_file_by_the_model(home, tmp_path, monkeypatch):
    model, digest = model_path("ksana-tiny"), digest_of_files(model_path("ksana-tiny"))
    config = EngineConfig(kv_eviction={"method": "criticalkv", "of": {"method": "expected_attention_stats"}})
    setting = with_statistics(config, model).kv_eviction
    assert setting["of"]["statistics"] == str(default_file("expected_attention", digest))
    codec = {"k": "kvquant4", "v": "kvquant4", "statistics": str(default_file("kvquant", digest))}
    assert with_statistics(EngineConfig(kv_cache_dtype=codec), model).kv_cache_dtype == codec
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"does not exist: ksana calibrate .*ksana-tiny --text TEXT --for qfilter"):
        LLM("ksana-tiny", kv_eviction={"method": "qfilter"})


def test_numbers_of_another_model_or_kind_are_refused(home, tmp_path):
    model = model_path("ksana-tiny")
    mine = read_statistics(default_file("qfilter", digest_of_files(model)), "qfilter")
    mine._replace(model="0123456789abcdef").write(tmp_path / "other.npz")
    with pytest.raises(ConfigError, match=f"digest 0123456789abcdef, this one has {mine.model}"):
        with_statistics(
            EngineConfig(kv_eviction={"method": "qfilter", "statistics": str(tmp_path / "other.npz")}), model
        )
    with pytest.raises(ConfigError, match="are for qfilter, and expected_attention is needed"):
        read_statistics(tmp_path / "other.npz", "expected_attention")
    (tmp_path / "text.npz").write_text("nothing")
    with pytest.raises(ConfigError, match="not a file of ksana calibrate"):
        read_statistics(tmp_path / "text.npz", "qfilter")


def test_records_have_the_hashes_of_text_and_numbers_and_no_path(home):
    file = default_file("qfilter", digest_of_files(model_path("ksana-tiny")))
    method = {"method": "qfilter", "prompts": "streamed"}
    given = {"task": "perplexity", "model": "ksana-tiny", "settings": {"num_tokens": 128}}
    found, named = (
        plan(given | {"engine": {"kv_eviction": setting}}).rows[0].trials[0]
        for setting in (method, method | {"statistics": str(file)})
    )
    numbers = read_statistics(file, "qfilter")
    assert found.config["inputs"]["qfilter_text"] == numbers.sha256[:16]
    assert found.config["inputs"]["qfilter_numbers"] == numbers.digest
    assert found.id == named.id


def test_fitted_levels_lose_less_than_uniform_ones():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 2, 64)).astype(np.float32)
    uniform = find_sealing({"k": "kvquant2", "v": "kvquant2"})
    assert uniform is not None
    for side in "kv":
        levels = 3 * _means(np.asarray(_histogram(x, side), np.float64), 2)
        codec = getattr(uniform, side)

        class Fitted(type(codec)):
            _levels = levels.astype(np.float32)

        fitted = Fitted(**{f.name: getattr(codec, f.name) for f in dataclasses.fields(codec)})
        blocks = x.reshape(-1, 64, 2, 64).swapaxes(1, 2)
        errors = [((c.decode(c.encode(blocks, np), np) - blocks) ** 2).mean() for c in (codec, fitted)]
        assert errors[1] < 0.85 * errors[0]
