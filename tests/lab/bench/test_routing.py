"""`ksana bench routing`: rows, numbers and errors."""

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Case
from ksana_jax.lab.bench.routing import Routing
from ksana_jax.lab.experiments.tasks.results import ResultRow


def test_choices_are_timed_with_as_much_work_under_way_at_any_time():
    bench = Routing(servers=(3,), blocks=(4,), policies=("min_ttft",), requests=50)
    bench.start()
    [case] = bench.cases()
    for _ in range(2):
        found = bench.measure(case)
        assert 0 < found["match_s"] < found["decision_s"] < found["total_s"]
        assert len(bench.routers[case.name].router.ledger.live) == 2 * 3
    bench.routers[case.name].router.check()


def test_every_policy_has_a_row_for_each_number_of_servers_and_blocks():
    cases = Routing(servers=(4, 8), blocks=(2,), policies=("random", "e2")).cases()
    assert cases[:2] == [Case("random", {"servers": 4, "blocks": 2}), Case("e2", {"servers": 4, "blocks": 2})]
    assert len(cases) == 4


def test_the_conclusion_names_the_slowest():
    rows = [
        ResultRow(name, {"servers": 16, "blocks": 30}, 1, [[]], {"decision_s": [s]})
        for name, s in (("a", 1e-5), ("b", 2e-5))
    ]
    assert Routing().conclusion(rows) == "Slowest decision: 20.0 µs with 16 servers (b)."


@pytest.mark.parametrize(
    ("options", "said"), [({"policies": ("e3",)}, "policies is 'e3'"), ({"blocks": (0,)}, "blocks is 0")]
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Routing(**options).cases()
