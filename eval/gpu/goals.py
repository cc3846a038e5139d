"""Goals: what was to be reached on a GPU, what was foretold, and what each machine reached."""

from __future__ import annotations

from kvlab.arithmetic import MACHINES

from . import predict
from .tables import markdown, number, rows_of

GOALS = (
    "int8 attention at least 1.8 times as fast as bf16 flash at 64k tokens, batch 1",
    "int4 attention at least 3 times",
    "int8 attention at 70 % of the bandwidth or more",
    "InfiniGen at least 5.28 times FlexGen at 2,048 tokens on the throttled link",
    "InfiniGen at most 1.3 times the ideal",
    "a step of every method that does not offload at most 1.05 times transformers' fastest, precisions equal",
    "the simulator within 20 % on every bar of the headline",
)


def goals(machines: dict[str, dict]) -> str:
    """Every goal beside what each machine reached."""
    rows = []
    reached = {name: reached_by(found) for name, found in machines.items()}
    for index, goal in enumerate(GOALS):
        measured = [reached[name][index] for name in machines] or ["not measured"]
        rows.append([goal, foretold()[index], *measured])
    return "## To reach\n\n" + markdown(["goal", "predicted", *(machines or ["measured"])], rows, 3)


def foretold() -> list[str]:
    """What a roofline or the simulator says of GOALS, in their order, on the machine of the sheet."""
    rows = {(row["batch"], row["link_gbps"], row["system"]): row for row in predict.unseen()}
    slow, own = predict.PUBLISHED_LINK / 1e9, MACHINES[predict.SHEET].link / 1e9
    offload, ours = rows[PAPER, slow, "offload"], rows[PAPER, slow, "infinigen"]
    steps = {key: row["step_ms"] for key, row in rows.items()}
    ideal = [steps[PAPER, link, "infinigen"] / steps[PAPER, link, "full"] for link in (slow, own)]
    return [
        f"at most {16 / 8.125:.2f}, the ratio of the bytes", f"at most {16 / 4.125:.2f}, likewise", "–",
        number(offload["total_s"] / ours["total_s"]),
        f"{number(ideal[0])} on the throttled link, {number(ideal[1])} on its own", "–", "–",
    ]  # fmt: skip


def reached_by(machine: dict) -> list[str]:
    """What a machine reached of GOALS, in their order."""
    at = {
        row["kernel"]: row
        for row in rows_of(machine, "attention")
        if row["shape"] == "Llama-3-8B" and row["tokens"] == 65536 and row["batch"] == 1 and "ms" in row
    }
    bars = [row for row in rows_of(machine, "headline") if "step_ms" in row]
    infinigen = [
        row for row in bars
        if row["system"] == "infinigen" and row["prompt"] == 1920 and row["link"] == "throttled"
    ]  # fmt: skip
    ours = max(infinigen, key=lambda row: row["batch"], default={})  # the paper's batch, or what fitted
    at_batch = "" if ours.get("batch", PAPER) == PAPER else f" at batch {ours['batch']}"
    off = [abs(row[key]) for row in bars for key in ("error", "error_total") if key in row]

    def said(value, least: float | None = None, most: float | None = None, unit: str = "") -> str:
        if value is None:
            return "not measured"
        good = (least is None or value >= least) and (most is None or value <= most)
        return f"{number(value)}{unit}: {'reached' if good else 'not reached'}"

    int8, int4 = at.get("kvlab int8", {}), at.get("kvlab int4", {})
    share = int8.get("fraction")
    return [
        said(int8.get("speedup"), 1.8),
        said(int4.get("speedup"), 3.0),
        said(None if share is None else 100 * share, 70, unit=" %"),
        said(ours.get("faster"), 5.28) + at_batch,
        said(ours.get("of_ideal"), most=1.3) + at_batch,
        steps_beside(rows_of(machine, "step")),
        said(max(off, default=None), most=20, unit=" %"),
    ]


PAPER = 20  # rows of InfiniGen's experiment


def steps_beside(rows: list[dict]) -> str:
    """Whether every method that does not offload is at most 1.05 times as slow as the fastest of
    transformers' caches of as many bits, over all parts of the stage; who could not be compared is named."""
    fastest, slower, alone = {}, set(), set()
    for row in rows:
        if row["method"].startswith("hf-") and "best_ms" in row:
            key = row["model"], row["tokens"], row["batch"], row["bits"]
            fastest[key] = min(row["best_ms"], fastest.get(key, row["best_ms"]))
    mine = [row for row in rows if not row["method"].startswith("hf-") and not row.get("offloads")]
    for row in mine:
        base = fastest.get((row["model"], row["tokens"], row["batch"], row["bits"]))
        if base is None or "best_ms" not in row:
            alone.add(row["method"])
        elif row["best_ms"] > 1.05 * base:
            slower.add(f"{row['method']} {row['best_ms'] / base:.2f}")
    compared = {row["method"] for row in mine} - alone
    if not compared:
        return "not measured"
    verdict = (
        f"not by {', '.join(sorted(slower))}" if slower else "reached" if not alone else "reached by the rest"
    )
    return verdict + (f"; nothing to compare: {', '.join(sorted(alone))}" if alone else "")
