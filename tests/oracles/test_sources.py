"""docs/sources.md lists every claim of the five texts; each row's place and check exist."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8").splitlines()
LINES = [re.split(r"(?<!\\)\|", line)[1:-1] for line in TEXT if re.match(r"\| \d+ \|", line)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def sections(chapter: str) -> dict[str, bool]:
    """{heading: does a cell of code stand under it?} of a chapter."""
    (book,), found = ROOT.glob(f"notebooks/0{chapter}_*.ipynb"), {}
    for cell in json.loads(book.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            said = r"^#+ (.*?)(?: \((?:\d+ minutes|optional).*)?$"
            headings = re.findall(said, "".join(cell["source"]), re.MULTILINE)
            found.update(dict.fromkeys(headings, False))
        else:
            found[list(found)[-1]] = True
    return found


def test_rows_are_numbered():
    assert [int(number) for number, *_ in LINES] == list(range(1, 145))


@pytest.mark.parametrize("row", LINES, ids=lambda row: row[0].strip())
def test_every_place_exists(row):
    _, claim, where, check = row
    chapters = [sections(book)[heading] for book, heading in re.findall(r"chapter (\d), \*(.+?)\*", where)]
    links = re.findall(r"\]\((\w+\.md)?#([\w-]+)\)", where)
    known = all(mark in anchors(ROOT / "docs" / (page or "sources.md")) for page, mark in links)
    assert claim.strip() and (chapters or links) and known
    files = re.findall(r"`((?:docs|eval|kvlab|tests)/[^`:]+)(?:::(\w+))?`(?:: (\w+))?", where + check)
    for name, function, experiment in files:
        wanted = f"def {function}(" if function else f'"experiment": "{experiment}"' if experiment else ""
        assert (ROOT / name).is_file() and (not wanted or wanted in (ROOT / name).read_text("utf-8"))
    assert any(chapters) if "its cell" in check else re.search(r"`\w", check)


def test_bert_would_compute_again():
    torch.manual_seed(0)
    small = BertConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
    bert, ids = BertModel(small).eval(), torch.arange(1, 7)[None]
    one, two = (bert(some, output_hidden_states=True).hidden_states for some in (ids[:, :5], ids))
    assert torch.allclose(one[0], two[0][:, :5])  # what the first layer's keys are made of
    assert not torch.allclose(one[1], two[1][:, :5], atol=1e-4)  # and the second's
