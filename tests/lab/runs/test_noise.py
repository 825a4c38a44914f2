"""Rows differ when their means are more than two standard deviations apart; on the same texts, of their differences."""

import pytest

from ksana_jax.lab.runs import noise
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, number

SPEED = Column("speed", "tokens/s", number(0), "max")
PPL = Column("ppl", "ppl", number(2), "min")
BYTES = Column("bytes", "KV", number(0), "min", exact=True)


def row(label, samples=(), **values):
    return ResultRow(label, {}, 3, [[]], values, {"ppl": samples} if samples else {})


def test_a_difference_within_two_pooled_deviations_is_noise():
    # Deviations of 10 in both rows: 20 apart is not beyond, 21 is.
    first = row("a", speed=[90, 100, 110])
    assert not noise.differ(first, row("b", speed=[110, 120, 130]), "speed")
    assert noise.differ(first, row("b", speed=[111, 121, 131]), "speed")
    # Of deviations 0 and 10 the pooled one is 7.07.
    assert not noise.differ(first, row("b", speed=[114, 114]), "speed")
    assert noise.differ(first, row("b", speed=[115, 115]), "speed")


def test_one_run_each_resolves_nothing():
    assert not noise.differ(row("a", speed=[1.0]), row("b", speed=[1000.0]), "speed")
    assert not noise.differ(row("a", speed=[1.0, 1.1]), row("b", speed=[1000.0]), "speed")
    assert noise.leaders([row("a", speed=[1.0]), row("b", speed=[1000.0])], SPEED) == []
    assert noise.caveat(row("a", speed=[1.0]), row("b", speed=[9.0]), "speed") == "not resolved: one run each"
    (note,) = noise.notes([row("a", speed=[1.0]), row("b", speed=[1000.0])], [SPEED, BYTES])
    assert note.startswith("Not resolved: one run each")


def test_rows_on_the_same_texts_are_compared_by_their_differences():
    # Texts differ by far more than the rows do on any of them.
    a, b = row("a", "xyz", ppl=[2.0, 5.0, 9.0]), row("b", "xyz", ppl=[2.2, 5.25, 9.2])
    assert noise.differ(a, b, "ppl")
    assert noise.leaders([a, b], PPL) == [a]
    assert "of their differences on each" not in noise.notes([row("a", ppl=[1, 2]), row("b", ppl=[3, 4])], [PPL])[0]
    assert "if rows scored the same texts, of their differences on each text" in noise.notes([a, b], [PPL])[0]
    # The same numbers of other texts say nothing.
    assert not noise.differ(a, row("b", "uvw", ppl=[2.2, 5.25, 9.2]), "ppl")
    assert not noise.differ(a, row("b", ppl=[2.2, 5.25, 9.2]), "ppl")


def test_pairs_are_found_by_sample_not_by_place():
    a, b = row("a", "xyz", ppl=[2.0, 5.0, 9.0]), row("b", "zxy", ppl=[9.2, 2.2, 5.25])
    assert noise.paired_differences(b, a, "ppl") == pytest.approx([0.2, 0.2, 0.25])


def test_bold_is_what_leads_all_others_beyond_the_noise():
    best, near, far = row("a", speed=[100, 101]), row("b", speed=[95, 101]), row("c", speed=[10, 11])
    assert noise.leaders([far, best], SPEED) == [best]
    assert noise.leaders([far, best, near], SPEED) == []
    assert noise.leaders([far, best, row("none")], SPEED) == [best]
    # What reads the same is equally good.
    alike = row("d", speed=[100.1, 100.9])
    assert noise.leaders([far, best, alike], SPEED) == [best, alike]
    assert noise.leaders([row("a", speed=[1.0])], SPEED) == noise.leaders([], SPEED) == []
    assert noise.caveat(best, near, "speed") == "not resolved: within 2 standard deviations"
    assert noise.caveat(best, far, "speed") == ""


def test_exact_counts_differ_if_they_read_differently():
    small, large = row("a", bytes=[512.0]), row("b", bytes=[513.0])
    assert noise.leaders([small, large], BYTES) == [small]
    assert noise.leaders([small, row("b", bytes=[512.2])], BYTES) == []
    assert noise.notes([small, large], [BYTES]) == []


def test_columns_of_one_run_are_named_where_others_have_more():
    rows = [row("a", speed=[1.0, 2.0], ppl=[3.0]), row("b", speed=[1.0, 2.0], ppl=[4.0])]
    assert noise.notes(rows, [SPEED, PPL]) == [
        "Bold: best by more than 2 standard deviations.",
        "Not resolved, one run each: ppl.",
    ]
    rows = [row("a", speed=[1.0, 2.0], ppl=[3.0], late=[3.0]), row("b", speed=[1.0, 2.0], ppl=[4.0], late=[2.0])]
    late = Column("late", "ppl late", number(2), "min")
    assert noise.notes(rows, [PPL, SPEED, late])[1:] == ["Not resolved, one run each: ppl; ppl late."]
