"""What the course says of models was seen on the model that is named."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from kvlab.arithmetic import SHAPES, decode_flops, prefill_flops

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROSE = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "kvlab/workshop").glob("*.md")),
]
MANY = re.compile(r"(?i)\b(?:large|larger|big|bigger|most|many|all|real) (?:language )?models?\b")
# No claim of how such models behave: a title, sizes, what can be run, what is measured.
HARMLESS = (
    "Inference of Large Language Models",
    "Efficient Memory Management for Large Language Model Serving",
    "give memory figures for large models",
    "runs on larger models too, unchanged",
    "at a real model",
    "of larger models and machines",
    "A real model does this in every layer",
)


def told(path: Path) -> str:
    """The prose of a page or chapter, line ends as spaces."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        return " ".join(" ".join(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("path", [*CHAPTERS, *PROSE], ids=lambda path: path.name)
def test_nothing_is_said_of_models_that_are_not_named(path):
    text = told(path)
    for words in HARMLESS:
        text = text.replace(words, "")
    assert [text[max(0, m.start() - 60) : m.end() + 60] for m in MANY.finditer(text)] == []


def test_a_sentence_about_large_models_would_be_found():
    assert MANY.search("large models have it by themselves")
    assert MANY.search("on which many models put much attention")


def test_the_work_of_a_cached_step_goes_on_growing_and_the_course_says_so():
    shape = SHAPES["Llama-2-7B"]
    assert decode_flops(shape, 65536) > 3 * decode_flops(shape, 128)
    assert prefill_flops(shape, 65536) > 1000 * prefill_flops(shape, 128)
    assert all("work per token stops growing" not in told(path) for path in [*CHAPTERS, *PROSE])


def test_the_training_toward_alike_inputs_stands_beside_the_figure_that_it_flatters():
    cells = nbformat.read(ROOT / "notebooks/07_infinigen.ipynb", as_version=4).cells
    after = [cell for cell in cells if cell.get("id") == "alike" or cell.cell_type == "markdown"]
    beside = after[[cell.get("id") for cell in after].index("alike") + 1].source
    assert "*trained* toward it" in beside and "CARD.md" in beside
