"""Tables of stored gates (`kvlab gate --json`): verdicts by models, and how well they are foreseen."""

from __future__ import annotations

import json

from kvlab.gating.rules import BREAKS

from ..core.digests import ROOT
from . import tables

HOME = ROOT / "docs" / "results" / "gate"


def stored() -> dict[str, dict]:
    """{model: its gate}, of real models."""
    files = sorted(HOME.glob("*.json"))
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.stem != "planted"
    }


def verdicts() -> str:
    """Methods by models: the verdict, nats and the share of most probable tokens that are the same."""
    found, cells = stored(), []
    for model, gate in found.items():
        for line in gate["lines"]:
            if (spent := line["cost"]) is not None:
                told = f"{line['verdict']}: {spent['nats']:.2g} ({100 * spent['agrees']:.0f} %)"
                cells.append((f"`{line['method']}`", model, told))
    made = "; ".join(
        f"{model}: {gate['tokens']} tokens, {gate['made']['cpu']}, torch {gate['made']['torch']}, "
        f"{gate['made']['date']}"
        for model, gate in found.items()
    )
    return tables.markdown(["format"], tables.grid(cells, found), made)


def foreseen() -> str:
    """How often, of a format that breaks a model and one that does not, the scores of the first move more."""
    planted = json.loads((HOME / "planted.json").read_text(encoding="utf-8"))
    pairs = {
        "planted channels, 1 to 300 times as large (workshop model)": [
            (row["noise"], row["nats"]) for row in planted["rows"]
        ],
        ", ".join(stored()): [
            (line["cost"]["noise"], line["cost"]["nats"])
            for gate in stored().values()
            for line in gate["lines"]
            if line["cost"] is not None
        ],
    }
    pairs["all"] = [pair for some in pairs.values() for pair in some]
    body = []
    for name, some in pairs.items():
        broken = [noise for noise, nats in some if nats >= BREAKS and noise is not None]
        others = [noise for noise, nats in some if nats < BREAKS and noise is not None]
        wins = sum((x > y) + (x == y) / 2 for x in broken for y in others)
        area = f"{wins / (len(broken) * len(others)):.3f}" if broken and others else "–"
        body.append([name, str(len(broken)), str(len(others)), area])
    return tables.markdown(["of", "break", "do not", "area under the ROC curve"], body)
