"""The page Use it and README: every block runs, in its order."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks() -> list[tuple[str, str, str]]:
    """(the page, its heading, the block), in their order, but for blocks that are files (`# mine.py`)."""
    found = []
    for page in ("docs/use.md", "README.md"):
        text, heading = (ROOT / page).read_text(encoding="utf-8"), None
        for title, block in re.findall(r"^## ([^\n]+)\n|^```python\n(.*?)^```", text, re.M | re.S):
            heading = title or heading
            found += [(page, heading, block)] if block and not block.startswith("# ") else []
    return found


@pytest.fixture(scope="module")
def said() -> dict:
    """What the blocks of a page share, as in a notebook."""
    return {"docs/use.md": {}, "README.md": {}}


@pytest.mark.parametrize(
    "place", range(len(blocks())), ids=[f"{n} {h}" for n, (_, h, _) in enumerate(blocks())]
)
def test_a_block_runs(said, place, capsys):
    page, heading, block = blocks()[place]
    if page == "docs/use.md":
        assert len(block.splitlines()) <= 12
    if "peft" in block and importlib.util.find_spec("peft") is None:
        pytest.skip("the package peft is not installed")
    exec(compile(block, f"{page}, {heading}", "exec"), said[page])
    if heading == "Ask" and "answers" in block:
        assert [answer.text.strip() for answer in said[page]["answers"]] == ["Otis.", "Mia."]
