"""docs/gpu.md, whose tables are made from what machines have written."""

from __future__ import annotations

import json
from pathlib import Path

from eval.gpu import page

ROOT = Path(__file__).parents[3]


def test_the_page_is_as_it_is_written():
    stored = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    machines = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / "docs" / "results" / "gpu").glob("*.json"))
    }
    assert stored == page.filled(stored, machines), "python -m eval gpu --report"
