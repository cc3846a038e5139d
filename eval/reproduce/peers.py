"""Peers: the table of our methods beside those of kvpress, and where their definitions part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt

from ..peers.pairs import PAIRS
from ..report.rows import provenance

ABOUT = "Our methods beside those of kvpress 0.5.5, on the same token ids with the same number of tokens held"
SETS = ("alike", "same_heads", "but_newest")
NEWEST = "ours always holds the newest token"
POOLED = "kvpress averages the votes of neighbours, we take the largest"
DIFFERS = {  # method -> where the definitions part
    "snapkv": POOLED,
    "pyramidkv:kernel=1": "where the highest layer would get less than the window, kvpress gives every layer "
    "the mean; ours holds the window there",
    "h2o:recent=0": "kvpress divides what a token received by the number of queries that could see it",
    "keydiff": NEWEST,
    "keydiff:renumber=true": NEWEST,
    "keydiff:chunk=8": "kvpress adds up the scores of all heads, which then hold the same whole chunks; our "
    "heads choose apart",
    "keydiff:merge=true": f"{NEWEST}; kvpress merges values alone, by norm, we merge keys and values by "
    "cosine, as D2O",
    "keynorm": f"{NEWEST}; we round norms, so that equal keys tie",
    "lagkv:lag=8": "blocks tie where the budget is no multiple of them: ours takes the older, kvpress any; "
    "what may differ besides was not traced",
    "expected": NEWEST,
    "adakv:of=keydiff": NEWEST,
    "adakv:of=snapkv": POOLED,
    "kvzip": NEWEST,
    "kvzip:over=layer": NEWEST,
    "random": "other random numbers",
}


def rows(cells: Iterable[dict]) -> list[dict]:
    """The stored cells of `python -m eval peers` as rows, pair by pair."""
    order = [pair.method for pair in PAIRS]
    found = [row for row in _rows(cells) if row["method"] in order]
    return sorted(found, key=lambda r: (r["model"], r["task"], r["protocol"], order.index(r["method"])))


def _rows(cells: Iterable[dict]) -> Iterator[dict]:
    for cell in cells:
        kind, _, rest = cell["task"].partition(":")
        if kind == "peers":
            task, protocol = rest.split(":")
            named = {"model": cell["model"], "task": task, "protocol": protocol, "method": cell["method"]}
            yield named | {"press": cell["press"]} | cell["row"] | provenance(cell, "data")


def lines(found: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Head and body of the table of one model: a line for each pair, means over tasks and protocols."""
    head = [
        "ours", "kvpress", "held alike", "heads the same", "but for the newest", "log-probabilities apart",
        "same answer", "right", "prefill, CPU ms", "step, CPU ms", "cache, KB", "peak, MB", "why they differ",
    ]  # fmt: skip
    body = []
    for method in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == method]
        n = sum(row["n"] for row in mine)

        def mean(get, mine=mine, n=n) -> float:
            return sum(get(row) * row["n"] for row in mine) / n

        def both(name: str, unit: float, digits: int, mean=mean, mine=mine) -> str:
            if any(row[side][name] is None for row in mine for side in ("ours", "theirs")):
                return "–"
            told = (mean(lambda row, side=side: row[side][name]) * unit for side in ("ours", "theirs"))
            return " / ".join(f"{value:.{digits}f}" for value in told)

        right = [mean(lambda row, side=side: row[side]["value"]) for side in ("ours", "theirs")]
        body.append([
            f"`{method}`", f"`{mine[0]['press']}`",
            *(f"{100 * mean(lambda row, name=name: row[name]):.1f} %" for name in SETS),
            f"{mean(lambda row: row['apart']):.2g}", f"{100 * mean(lambda row: row['same_answer']):.0f} %",
            " / ".join(f"{100 * value:.0f}" for value in right) + f" ± {100 * sqrt(0.25 / n):.0f}",
            both("prefill", 1e3, 0), both("step", 1e3, 1), both("bytes", 1e-3, 0), both("peak", 1e-6, 1),
            DIFFERS.get(method, ""),
        ])  # fmt: skip
    return head, body
