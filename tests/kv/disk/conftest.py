"""Tiers on temporary folders."""

import pytest

from ksana_jax.kv.disk.tier import DiskTier
from tests.kv.disk.blocks import FORMAT, AtOnce, Later
from tests.kv.disk.tiers import PLENTY


@pytest.fixture
def open_tier(tmp_path):
    """Opens tiers on one folder, with a list for their warnings; closes the open ones."""
    told, tiers = [], []

    def make(format=FORMAT, budget=PLENTY, folder=tmp_path, **settings) -> DiskTier:
        settings = {"warn": told.append, "executor": AtOnce(), **settings}
        tiers.append(DiskTier(folder, format, budget, **settings))
        return tiers[-1]

    make.told = told
    yield make
    for tier in tiers:
        if isinstance(tier._executor, Later):
            tier._executor = AtOnce()
        tier.close()
