"""Schedules as plain data: optimal, legal, and made without recursion."""

from math import comb

import pytest

from recollect.schedules import revolve


def closed_formula(length, slots):
    r = next(r for r in range(length + 1) if comb(slots + r, slots) >= length)
    return r * length - comb(slots + r, r - 1) if r else 0


@pytest.mark.parametrize("slots", range(1, 13))
def test_revolve_takes_what_the_formula_says(slots):
    for length in range(1, 201):
        counts = revolve(length, slots).check()
        assert counts.extra == closed_formula(length, slots)
        assert counts.peaks[0] <= slots


def test_a_thousand_steps_with_ten_slots():
    assert revolve(1000, 10).cost() == 3636
