"""The ledger's numbers are read from stored cells, and what has none says so."""

import math

import pytest

from eval.reproduce import ledger


@pytest.mark.parametrize("part", ledger.ENTRIES)
def test_every_entry_has_a_row(part):
    lines = ledger.table(part).splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(ledger.ENTRIES[part]) + 2
    for entry, line in zip(ledger.ENTRIES[part], lines[2:], strict=False):
        there = ledger.ours(entry) is not None and ledger.published(entry) is not None
        assert ("not made yet" in line) == (not there)


def test_a_ratio_of_perplexities_goes_by_chunks():
    value, low, high = ledger.ratio([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    assert value == pytest.approx(math.exp(0.5))
    assert low == pytest.approx(high) == pytest.approx(value)
    assert ledger.inside(1.6, value, 1.5, 1.7) == "yes"
    assert ledger.inside(1.8, value, 1.5, 1.7) == "no"
    assert "times" in ledger.inside(1.8, value, None, None)
