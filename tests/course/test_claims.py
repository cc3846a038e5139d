"""What two chapters tell of the contract in words is what the bill says."""

from __future__ import annotations

from pathlib import Path

import nbformat

import kvlab
from course.teaching import contract

ROOT = Path(__file__).resolve().parents[2]


def test_the_hook_of_chapter_2_tells_what_the_bill_says():
    """Half the contract fits beside the weights, and a step of it is quick; all of it does not fit."""
    assert contract.PAGES == 200
    half = kvlab.bill(contract.MODEL, contract.DEVICE, context=contract.TOKENS // 2, methods="full").lines[0]
    assert half.users == 1 and 0.01 < half.step < 0.1
    assert contract.bill("full").lines[0].users == 0
    opening = nbformat.read(ROOT / "notebooks/02_kv_cache.ipynb", as_version=4).cells[0]
    for text in (opening.source, " ".join(opening.metadata["slides"][0]["words"])):
        text = " ".join(text.split())
        assert "the first hundred pages" in text and "hundredths of a second" in text
        assert "all two hundred" in text and "*out of memory*" in text


def test_what_chapter_7_says_of_its_bill_is_what_the_bill_says():
    step = {line.method: line.step for line in contract.bill("int4", "h2o", "offload", "infinigen").lines}
    assert round(step["offload"] / step["infinigen"]) == 4 and step["int4"] < step["infinigen"]
    assert 6.5 < step["infinigen"] / step["h2o"] < 7
    cells = {
        cell.id: cell for cell in nbformat.read(ROOT / "notebooks/07_infinigen.ipynb", as_version=4).cells
    }
    for text in (cells["c69"].source, cells["bill"].metadata["slides"][0]["say"]):
        assert "almost seven times" in " ".join(text.split()) and "with H2O" in text
    assert "first method" not in cells["c69"].metadata["slides"][0]["say"]
