"""One test for all differences between rows: paired t by sample or seed, ratios of perplexity, Holm's correction."""

import math

import numpy as np
import pytest
import scipy.stats

from ksana_jax.lab.runs import significance
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, number

SPEED = Column("speed", "tokens/s", number(0), "max")
PPL = Column("ppl", "ppl", number(2), "min", change="loss, %")
SCORE = Column("score", "score", number(1), "max", change="change, points")
BYTES = Column("bytes", "KV", number(0), "min", exact=True)
RNG = np.random.default_rng(0)


def row(label, baseline=None, point=None, **values):
    return ResultRow(label, point or {}, 3, [[]], values, baseline=baseline)


def texts(label, ppl, weights=None, names="abcdefghijklmnop", baseline=None):
    weights = [1.0] * len(ppl) if weights is None else weights
    given = {"samples": {"ppl": list(names)[: len(ppl)]}, "weights": {"ppl": weights}}
    return ResultRow(label, {}, 3, [[]], {"ppl": ppl}, **given, geometric=True, baseline=baseline)


def test_the_test_is_scipys_paired_t_with_its_interval():
    differences = RNG.normal(1, 2, 9).tolist()
    expected = scipy.stats.ttest_1samp(differences, 0)
    low, high = expected.confidence_interval(0.95)
    found = significance.paired_t(differences)
    assert found == pytest.approx((np.mean(differences), low, high, expected.pvalue), rel=1e-12)


def test_texts_count_by_their_tokens():
    # A text of twice the tokens moves the mean twice as much; equal weights, whatever they are, are the plain test.
    assert significance.paired_t([0.0, 3.0], [2.0, 1.0])[0] == 1.0
    differences = [1.0, 2.0, 4.0]
    assert significance.paired_t(differences, [7.0] * 3) == pytest.approx(significance.paired_t(differences))
    # The ratio estimator's error, by hand: sqrt(n / (n - 1) sum (w d)^2) with deviations -1, 2 and weights 2/3, 1/3.
    low, high = significance.paired_t([0.0, 3.0], [2.0, 1.0])[1:3]
    error = math.sqrt(2 * ((2 / 3 * 1) ** 2 + (1 / 3 * 2) ** 2))
    assert (high - low) / 2 == pytest.approx(scipy.stats.t.ppf(0.975, 1) * error)


def test_differences_without_a_deviation_have_the_p_of_their_signs():
    assert significance.paired_t([0.5]) == (0.5, None, None, None)
    assert significance.paired_t([0.5] * 3) == (0.5, None, None, 0.25)
    assert significance.paired_t([0.0] * 3) == (0.0, None, None, 1.0)
    assert significance.paired_t([1.0] * 8)[3] < 0.01


def test_holms_correction_is_that_of_statsmodels():
    # statsmodels 0.14.5: multipletests([0.01, 0.04, 0.03, 0.005], method="holm").
    assert significance.holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert significance.holm([0.9, 0.8]) == [1.0, 1.0] and significance.holm([]) == []


def test_perplexities_change_by_a_ratio_of_all_tokens():
    full = texts("full", [10.0, 20.0], weights=[300, 100])
    mine = texts("window", [11.0, 25.0], weights=[300, 100], baseline=full)
    pooled = [math.exp((300 * math.log(a) + 100 * math.log(b)) / 400) for a, b in ([10, 20], [11, 25])]
    assert [full.mean("ppl"), mine.mean("ppl")] == pytest.approx(pooled)
    found = significance.baseline_change(mine, "ppl")
    assert found is not None and found.relative and found.num_pairs == 2
    assert found.mean == pytest.approx(pooled[1] / pooled[0] - 1)
    assert found.text(PPL).startswith("+13.6 [−") and full.sd("ppl") is None
    assert significance.baseline_change(full, "ppl") is None


def test_changes_are_written_with_their_signs():
    def said(*values, column=SCORE, relative=False):
        return significance.Change(3, relative, *values).text(column)

    assert said(-3.0, -4.0, 0.04) == "−3.0 [−4.0, 0.0]"
    assert said(12.5, 0.1, 30.0, relative=True) == "+1,250 [+10.0, +3,000]"
    assert said(math.inf) == "∞" and said(0.0) == "0.0"
    assert said(0.0001, -0.0004, 0.0006, relative=True) == "+0.01 [−0.04, +0.06]"


def test_pairs_are_found_by_sample_not_by_place_and_only_common_ones_count():
    a, b = texts("a", [2.0, 5.0, 9.0]), texts("b", [9.9, 2.2, 5.5], names="cab")
    found = significance.change(b, a, "ppl")
    assert found is not None and found.mean == pytest.approx(0.1) and found.num_pairs == 3
    assert significance.change(texts("c", [9.9], names="c"), a, "ppl").num_pairs == 1
    assert significance.change(texts("d", [1.0, 2.0], names="xy"), a, "ppl") is None
    # Of equal seeds without samples, by place.
    assert significance.change(row("e", speed=[1.0, 2.0]), row("f", speed=[3.0, 5.0]), "speed").mean == -2.5


def test_rows_on_the_same_texts_differ_though_texts_differ_more():
    a = texts("a", [2.0, 5.0, 9.0, 30.0])
    b = texts("b", [2.2, 5.6, 10.0, 33.5])
    assert significance.differ([(a, b)], "ppl") == [True]
    assert significance.leaders([b, a], PPL) == [a] and significance.tied(a, [a, b], "ppl") == []
    # The same numbers of other texts say nothing.
    other = texts("b", [2.2, 5.6, 10.0, 33.5], names="wxyz")
    assert significance.differ([(a, other)], "ppl") == [False] and significance.leaders([other, a], PPL) == []


def test_one_run_each_resolves_nothing():
    rows = [row("a", speed=[1.0]), row("b", speed=[1000.0])]
    assert significance.leaders(rows, SPEED) == [] and significance.differ([(rows[0], rows[1])], "speed") == [False]
    assert significance.caveat(*rows, "speed") == "not resolved: one run each"
    said = "Not resolved: one run each. Only exact counts are bold."
    assert significance.notes(rows, [SPEED, BYTES], "seeds", bold=True) == [said]
    assert significance.notes(rows, [SPEED, BYTES], "seeds", bold=False) == ["Not resolved: one run each."]


def test_bold_is_better_than_every_other_row_with_all_tests_counted():
    best, near, far = row("a", speed=[100, 102, 101]), row("b", speed=[99, 102, 100]), row("c", speed=[10, 11, 13])
    assert significance.leaders([far, best], SPEED) == [best]
    assert significance.leaders([far, best, near], SPEED) == []
    assert significance.tied(best, [far, best, near], "speed") == [near]
    assert significance.leaders([best, row("none")], SPEED) == [] == significance.leaders([], SPEED)
    # p = 0.03 alone; 0.06 as one of two.
    a, b = row("a", speed=[1.0, 2.0, 3.0]), row("b", speed=[4.0, 7.0, 8.6])
    p = significance.change(b, a, "speed").p
    assert 0.025 < p < 0.05
    assert significance.leaders([a, b], SPEED) == [b]
    assert significance.leaders([a, b, row("c", speed=[1.0, 2.0, 3.0])], SPEED) == []
    assert significance.caveat(best, far, "speed") == ""
    assert significance.caveat(best, near, "speed").startswith("not resolved: p = 0.")


def test_variants_over_a_grid_compete_at_each_point():
    rows = [
        row(label, point={"budget": budget}, speed=[value, value + 1, value + 3])
        for budget in (1, 2)
        for label, value in (("a", 10 * budget), ("b", 100 - budget))
    ]
    rows[1].values["speed"][0] += 0.5
    rows[3].values["speed"][0] += 0.5
    assert significance.leaders(rows, SPEED) == [rows[1], rows[3]]
    assert "of the same budget" in significance.notes(rows, [SPEED], "seeds", True)[-1]


def test_exact_counts_lead_alone_or_not_at_all():
    small, large = row("a", bytes=[512.0]), row("b", bytes=[513.0])
    assert significance.leaders([small, large], BYTES) == [small]
    assert significance.leaders([small, row("b", bytes=[512.2]), large], BYTES) == []
    assert significance.notes([small, large], [BYTES], "seeds", True) == []


def test_notes_say_against_what_and_over_how_many_texts():
    full = texts("full", [10.0, 20.0, 30.0])
    rows = [full, texts("window", [11.0, 25.0, 31.0], baseline=full)]
    against = "Loss, %: against full (ppl 18.17) on the same texts"
    found = significance.notes(rows, [PPL, BYTES], "texts", bold=True)
    assert found == [
        f"{against}, with the 95 % confidence interval over 3 texts in brackets (paired t).",
        "Bold: better than every other row (paired t-test, p < 0.05 after Holm's correction; counts: any difference).",
    ]
    assert significance.notes(rows, [PPL], "texts", bold=False) == found[:1]
    one = texts("one", [11.0], baseline=full)
    assert significance.notes([full, one], [PPL], "texts", True)[0] == (
        f"{against}; an interval needs two texts or more."
    )
