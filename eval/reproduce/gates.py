"""Tables of stored gates (`kvlab gate --json`): verdicts by models, how well they are predicted, and how the
limits agree with answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvlab.gating.rules import SAFE

from ..core.digests import ROOT
from . import tables

HOME = ROOT / "docs" / "results" / "gate"
HARM = 0.05  # of right answers: a format that loses as many should not be called safe


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


def answered() -> list[tuple[str, str, dict, float, str]]:
    """(family, method, its cost, the share of right answers that it loses, verdict), of every format that was
    both judged by a gate and asked questions."""
    found = []
    for gate in stored().values():
        family = re.match(r"[a-z]+", gate["model"])[0]
        mine = [row for row in tables.study("answers") if gate["model"].startswith(Path(row["model"]).stem)]
        right: dict[str, float] = {}
        for row in mine:
            right[row["method"]] = right.get(row["method"], 0.0) + row["value"] * row["n"]
        count = sum(row["n"] for row in mine if row["method"] == "full")
        for line in gate["lines"]:
            if line["cost"] is not None and line["method"] in right:
                lost = (right["full"] - right[line["method"]]) / count
                found.append((family, line["method"], line["cost"], lost, line["verdict"]))
    return found


def answers() -> str:
    """Formats by models: right answers under each, as `tables.percent` says them."""
    short = lambda model: re.sub(r"(-instruct)?-q4_k_m\.gguf$", "", model)
    rows = [row | {"model": short(row["model"])} for row in tables.study("answers")]
    if not rows:
        return tables.not_made("python -m eval reproduce --studies answers")
    keys = dict.fromkeys((row["task"], row["model"]) for row in sorted(rows, key=lambda row: row["task"]))
    found, there = tables.scores(rows, ("task", "model"), keys, "{}: {}")
    found.loc["guessing"] = tables.guessing(there)
    note = f"{tables.models_of(rows)}; * differs from `full` (McNemar, p < 0.05); {tables.made(rows[0])}"
    return tables.markdown(["method"], found, note)


def calibrated() -> str:
    """Each family left out in turn: the limit that the others give, which is the smallest upper end of an
    interval among their formats that lose answers, and what it and ours call safe in that family."""
    found = answered()
    if not found:
        return tables.not_made("python -m eval reproduce --studies answers")
    families = dict.fromkeys(family for family, *_ in found)
    body, total = [], [0, 0, 0, 0]
    for left in families:
        limit = min((cost["high"] for family, _, cost, lost, _ in found if family != left and lost >= HARM))
        mine = [(cost["high"], lost >= HARM) for family, _, cost, lost, _ in found if family == left]
        counts = []
        for most in (limit, SAFE):
            safe = [harm for high, harm in mine if high <= most]
            counts += [len(safe), sum(safe)]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        body.append(
            [left, str(len(mine)), str(sum(harm for _, harm in mine)), f"{limit:.2g}", *map(str, counts)]
        )
    harmful = sum(lost >= HARM for *_, lost, _ in found)
    body.append(["all", str(len(found)), str(harmful), "", *map(str, total)])
    head = ["left out", "formats", f"lose {100 * HARM:.0f} points", "limit of the others", "safe by it"]
    return tables.markdown([*head, "of them lose", f"safe by {SAFE:g}", "of them lose"], body)
