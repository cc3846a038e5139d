"""The page Use it: every block runs, in its order."""

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "use.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## ([^\n]+)\n|^```python\n(.*?)^```", PAGE, re.M | re.S)


def blocks() -> list[tuple[str, str]]:
    """(its heading, the block), in the page's order."""
    found, heading = [], None
    for title, block in BLOCKS:
        heading = title or heading
        found += [(heading, block)] if block else []
    return found


@pytest.fixture(scope="module")
def said() -> dict:
    """What the blocks share, as in a notebook."""
    return {}


@pytest.mark.uncounted
@pytest.mark.parametrize("place", range(len(blocks())), ids=[f"{n} {h}" for n, (h, _) in enumerate(blocks())])
def test_a_block_runs(said, place, capsys):
    heading, block = blocks()[place]
    assert len(block.splitlines()) <= 12
    if "peft" in block and importlib.util.find_spec("peft") is None:
        pytest.skip("the package peft is not installed")
    exec(compile(block, f"docs/use.md, {heading}", "exec"), said)
    if heading == "Ask" and "answers" in block:
        assert [answer.text.strip() for answer in said["answers"]] == ["Otis.", "Mia."]
