"""`make test` leaves out tests of unchanged packages, and runs all when it does not know."""

import pytest

from tests import unchanged


@pytest.mark.parametrize(
    "files, left_out",
    [
        (None, []),
        (["ksana_jax/core/config.py"], list(unchanged.PACKAGES)),
        (["pallas_kernels/work.py"], ["tests/serve/router/test_fluid.py"]),
        (["ksana_jax/serve/router/policies/e2.py", "tests/ops/test_table.py"], ["tests/pallas_kernels"]),
    ],
)
def test_only_tests_of_unchanged_packages_are_left_out(files, left_out):
    assert unchanged.unchanged(files) == left_out


def test_all_named_paths_exist():
    assert all((unchanged.ROOT / path).exists() for tests, on in unchanged.PACKAGES.items() for path in (tests, *on))


def test_without_the_base_commit_nothing_is_left_out(tmp_path, monkeypatch):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/speed.base").write_text("0" * 40)
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    assert unchanged.changed_files() is None
