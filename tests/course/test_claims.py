"""What the course says of models was seen on the model that is named."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

import kvlab
from course.slides import TALK
from course.teaching import contract, smollm2
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
    text, listed = path.read_text(encoding="utf-8"), "<!-- methods.*?<!-- end of methods -->"  # from the code
    return " ".join(re.sub(listed, "", text, flags=re.DOTALL).split())


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


def shown(chapter: str, cell: str) -> str:
    """The sentence that a cell with a picture has stored."""
    cells = nbformat.read(next((ROOT / "notebooks").glob(f"{chapter}_*.ipynb")), as_version=4).cells
    outputs = next(one for one in cells if one.get("id") == cell).outputs
    return " ".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs)


def test_what_is_said_of_the_front_is_what_its_picture_shows():
    front = re.search(r"Not beaten on these questions: (.*?)\.", shown("08", "pareto"))[1]
    assert front == "int4" and "int4 on 100% with 14% of the bytes" in shown("08", "pareto")
    chapter, talk = told(ROOT / "notebooks/08_compare.ipynb"), told(TALK)
    for text in (chapter, talk):
        assert "no best method" not in text
    assert "here it is four bits alone" in chapter and "four bits leave all others behind" in talk
    late = {row[0]: row[2] for row in smollm2.rows("needle")}
    assert (late["full"], late["int8"], late["full"] - late["int4"]) == (12, 12, 3)
    assert "four bits miss three of twelve answers" in chapter
    assert "four bits miss three answers of twelve" in talk


def test_every_picture_of_the_talks_slide_on_infinigen_is_spoken_of():
    """The recorded one speaks against the method, on the model that flatters it; the words say so."""
    took = {
        name: int(ms) for name, ms in re.findall(r"(\w+):budget=0.1 \d+ of (\d+) ms", shown("07", "recorded"))
    }
    assert took["infinigen"] > took["topk"]
    talk = told(TALK)
    assert "its step takes longer than top-k's" in talk and "first two layers" in talk
    assert "Here InfiniGen loses: two of its eight layers" in told(ROOT / "notebooks/07_infinigen.ipynb")


@pytest.mark.parametrize("path", [*CHAPTERS, *PROSE], ids=lambda path: path.name)
def test_no_page_leads_to_a_cell_by_a_name_that_is_not_shown(path):
    """Cells have names in the file, which Jupyter does not show."""
    assert not re.search(r"\bcell \*[\w-]+\*", told(path))


def test_a_paragraph_that_goes_on_with_and_stands_in_the_section_it_goes_on_from():
    cells = nbformat.read(ROOT / "notebooks/02_kv_cache.ipynb", as_version=4).cells
    text = "".join(cell.source + "\n\n" for cell in cells)
    section = text.partition("## When it does not help")[2].partition("\n## ")[0]
    assert "And where memory is short" in section


def test_the_kernels_are_not_said_to_run_where_they_may_not():
    """A kit leaves numba out."""
    text = told(ROOT / "notebooks/04_quantization.ipynb")
    assert "run through here" not in text and "A workshop's kit leaves numba out" in text


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
