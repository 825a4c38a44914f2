import pytest
from huggingface_hub import constants

from ksana_jax.core.sources import hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, without network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_commits", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"
