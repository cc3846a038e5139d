"""The table of stored gates (`kvlab gate --json`)."""

from __future__ import annotations

import json

from ..core.digests import ROOT
from . import tables

HOME = ROOT / "docs" / "results" / "gate"


def stored() -> dict[str, dict]:
    """{model: its gate}, without the planted ones."""
    files = sorted(HOME.glob("*.json"))
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.stem != "planted"
    }


def verdicts(*methods: str) -> str:
    """These methods, or all, by models: verdict, nats, share of most probable tokens that are the same."""
    found, cells = stored(), []
    for model, gate in found.items():
        for line in gate["lines"]:
            if (spent := line["cost"]) is not None and line["method"] in (methods or [line["method"]]):
                told = f"{line['verdict']}: {spent['nats']:.2g} ({100 * spent['agrees']:.0f} %)"
                cells.append((f"`{line['method']}`", model, told))
    made = "; ".join(
        f"{model}: {gate['tokens']} tokens, {gate['made']['cpu']}, torch {gate['made']['torch']}, "
        f"{gate['made']['date']}"
        for model, gate in found.items()
    )
    return tables.markdown(["format"], tables.grid(cells, found), made)
