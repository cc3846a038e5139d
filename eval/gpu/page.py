"""Page: the marked tables of docs/gpu.md, from docs/results/gpu/*.json, machines one after the other.

What a table shows is the rows as a run wrote them; only ratios within a table and what is said of goals are
computed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from kvlab.arithmetic import MACHINES, SHAPES

from ..core.digests import ROOT
from ..core.errors import Problem
from ..core.files import write_file
from ..core.table import markdown
from . import headline, predict, step

GOALS = (
    "int8 attention at least 1.8 times as fast as bf16 flash at 64k tokens, batch 1",
    "int4 attention at least 3 times",
    "int8 attention at 70 % of the bandwidth or more",
    "KIVI's kernels in bf16 at 40,000 tokens off by less than .01",
    "a step as a graph, Llama-3-8B, 8,192 tokens, batch 1: `static` and `full` at most 7.5 ms, `int8`, "
    "`int4` and `fp8` 7.4, `h2o`, `snapkv` and `kivi2` 8",
    "an eager step of every method that does not offload at most 1.1 times that of transformers' own",
    "FlexGen's baseline moves at least 85 % of what one large copy does",
    "InfiniGen at least 1.5 times that FlexGen, 2,048 tokens, batch 20, on the machine's own link",
    "InfiniGen at most 2 times the ideal there",
    "the simulator within 20 % on every bar of the headline",
)
LIMITS = {  # milliseconds of a step as a graph
    "static": 7.5, "full": 7.5, "int8": 7.4, "int4": 7.4, "fp8": 7.4, "h2o": 8.0, "snapkv": 8.0, "kivi2": 8.0,
}  # fmt: skip
PAPER = 20  # rows of InfiniGen's experiment
SHEET = "H100-PCIe5"  # the machine that predictions are of
SHOWN = ("torch", "triton", "transformers")
MARKED = re.compile(r"(<!-- gpu: (\w+) -->\n).*?(<!-- end of gpu -->)", re.DOTALL)


def report(measurement, store, show, wanted: list) -> None:
    """Set what GPUs said into docs/gpu.md, where that is asked for."""
    if measurement.report:
        show.line(write(ROOT / "docs"))


def write(docs: Path) -> str:
    """Write the marked tables of docs/gpu.md; returns what is to be said. Raises Problem for a file that
    cannot be read."""
    page = docs / "gpu.md"
    if not page.is_file():
        raise Problem(f"--report: there is no {page}; run it in a checkout of the project")
    machines = {}
    for file in sorted((docs / "results" / "gpu").glob("*.json")):
        try:
            machines[file.stem] = found = json.loads(file.read_text(encoding="utf-8"))
            if found["dry"]:
                raise ValueError("it is of a dry run, which says nothing about a GPU")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Problem(f"{file}: no gpu.json that can be shown ({error})") from None
    write_file(page, filled(page.read_text(encoding="utf-8"), machines))
    return f"{page}: {len(machines)} machines"


def filled(text: str, machines: dict[str, dict]) -> str:
    """The page with its tables as these machines say: {name: gpu.json}."""
    makers = {"goals": goals, "measured": measured, "steps": steps}
    return MARKED.sub(lambda mark: f"{mark[1]}{makers[mark[2]](machines)}{mark[3]}", text)


def rows_of(machine: dict, stage: str) -> list[dict]:
    """All rows of a stage."""
    units = machine["units"].items()
    return [row for name, unit in units if name.split(":")[0] == stage for row in unit["rows"]]


def number(value) -> str:
    """Three digits of a number, and a dash where there is none; a word as it is."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: list[dict], columns: str) -> str:
    """Rows as a table with these keys."""
    heads = columns.split()
    body = [[number(row.get(head)) for head in heads] for row in rows]
    return markdown(heads, body) + "\n" if rows else ""


# Goals.


def goals(machines: dict[str, dict]) -> str:
    """Every goal beside what each machine reached."""
    reached = [reached_by(found) for found in machines.values()] or [["not measured"] * len(GOALS)]
    rows = list(zip(GOALS, predictions(), *reached, strict=True))
    return markdown(["goal", "predicted", *(machines or ["measured"])], rows, words=3) + "\n"


def predictions() -> list[str]:
    """What a roofline or the simulator says of GOALS, in their order, on the machine of the sheet."""
    flexgen, ideal, ours = (
        predict.bar(system, MACHINES[SHEET], SHAPES["OPT-13B"], 1920, PAPER)
        for system in ("offload", "full", "infinigen")
    )
    return [
        f"at most {16 / 8.125:.2f}, the ratio of the bytes", f"at most {16 / 4.125:.2f}, likewise",
        *("–",) * 5, number(flexgen["total_s"] / ours["total_s"]),
        number(ours["step_ms"] / ideal["step_ms"]), "–",
    ]  # fmt: skip


def reached_by(machine: dict) -> list[str]:
    """What a machine reached of GOALS, in their order."""
    at = {
        row["kernel"].removeprefix("kvlab "): row
        for row in rows_of(machine, "attention")
        if row["shape"] == "Llama-3-8B" and row["tokens"] == 65536 and row["batch"] == 1
    }
    kivi = [
        row["error"]
        for row in rows_of(machine, "right")
        if row.get("kernel", "").startswith("kivi") and (row["dtype"], row["tokens"]) == ("bf16", 40000)
    ]
    bars = headline.beside(rows_of(machine, "headline"))
    here = [row for row in bars if (row["prompt"], row["link"]) == (1920, "real")]
    batch = max((row["batch"] for row in here), default=PAPER)  # the paper's, or what fitted
    at_batch = "" if batch == PAPER else f" at batch {batch}"
    named = {row["system"]: row for row in here if row["batch"] == batch}
    ours, flexgen = named.get("infinigen", {}), named.get("offload", {})
    copies = [row["gbps"] for row in rows_of(machine, "link") if row["what"] == "to device"]
    moved = flexgen["moved_bytes"] / flexgen["ms"] / 1e4 / max(copies) if flexgen and copies else None
    off = [abs(row[key]) for row in bars for key in ("error", "error_total")]

    def said(value, good, unit: str = "") -> str:
        if value is None:
            return "not measured"
        return f"{number(value)}{unit}: {'reached' if good(value) else 'not reached'}"

    int8, int4 = at.get("int8", {}), at.get("int4", {})
    share = int8["fraction"] * 100 if "fraction" in int8 else None
    return [
        said(int8.get("speedup"), lambda x: x >= 1.8),
        said(int4.get("speedup"), lambda x: x >= 3),
        said(share, lambda x: x >= 70, " %"),
        said(max(kivi, default=None), lambda x: x < 0.01),
        *steps_within(machine),
        said(moved, lambda x: x >= 85, " %") + at_batch,
        said(ours.get("faster"), lambda x: x >= 1.5 and (moved or 0) >= 85) + at_batch,
        said(ours.get("of_ideal"), lambda x: x <= 2) + at_batch,
        said(max(off, default=None), lambda x: x <= 20, " %"),
    ]


def steps_within(machine: dict) -> tuple[str, str]:
    """Whether steps as graphs are within LIMITS, and whether eager ones are near to transformers' static
    cache's; who is not, and who was not measured, is named."""
    rows = at_8192(machine)
    ours = {key: ms for key, ms in rows.items() if not (key[0].startswith("hf-") or step.offloads(key[0]))}
    graphs = {method: ms for (method, graph), ms in ours.items() if graph}
    eager = {method: ms for (method, graph), ms in ours.items() if not graph}
    theirs = rows.get(("hf-static", False))

    def verdict(slower: list[str], missing: list[str]) -> str:
        said = f"not by {', '.join(slower)}" if slower else "reached by the rest" if missing else "reached"
        return said + (f"; not measured: {', '.join(missing)}" if missing else "")

    found = graphs.keys() & LIMITS
    slower = [f"{name} {graphs[name]:.1f}" for name, limit in LIMITS.items() if graphs.get(name, 0) > limit]
    first = verdict(slower, [name for name in LIMITS if name not in graphs]) if found else "not measured"
    if not (theirs and eager):
        return first, "not measured"
    times = {name: ms / theirs for name, ms in eager.items()}
    return first, verdict([f"{name} {by:.1f}" for name, by in sorted(times.items()) if by > 1.1], [])


def at_8192(machine: dict) -> dict[tuple[str, bool], float]:
    """{(method, whether as a graph): milliseconds} of steps of Llama-3-8B at 8,192 tokens and one row."""
    return {
        (row["method"], row["way"] != "eager"): row["ms"]
        for row in rows_of(machine, "step")
        if (row["model"], row["tokens"], row["batch"]) == ("Llama-3-8B", 8192, 1) and "ms" in row
    }


def steps(machines: dict[str, dict]) -> str:
    """The steps of the newest run, for who reads nothing else."""
    made = {max(unit.get("made", "") for unit in one["units"].values()): one for one in machines.values()}
    if not made or not (found := at_8192(newest := made[max(made)])):
        return ""
    names = dict.fromkeys(name for name, _ in found if name in LIMITS or name.startswith("hf-"))
    rows = [[f"`{name}`", *(number(found.get((name, graph))) for graph in (False, True))] for name in names]
    about = newest["machine"]
    title = f"{about['device']}, commit {about.get('commit')}: a step, ms"
    return markdown([title, "eager", "as a graph"], rows) + "\n"


# What was measured.

COLUMNS = {  # stage -> keys of its rows
    "step": "method way model tokens batch bits ms ms_low ms_high bytes gbps fraction theirs",
    "attention": "kernel shape tokens batch ms ms_low ms_high gbps fraction speedup of_torch",
    "link": "what bytes ms ms_low ms_high gbps fraction",
    "headline": "system link prompt batch prefill_s ms ms_low ms_high total_s faster of_ideal predicted_ms "
    "error error_total",
}
BESIDE = {"step": step.beside, "headline": headline.beside}  # what ratios are added by


def measured(machines: dict[str, dict]) -> str:
    """Every machine's tables."""
    parts = [part for name, found in machines.items() for part in of_machine(name, found)]
    return "\n".join(part for part in parts if part)


def of_machine(name: str, found: dict) -> Iterable[str]:
    about = found["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v and k in SHOWN)
    units = f"{len(found['units'])} parts, {len(found['failed'])} failed"
    yield f"\n### {name}: {about['device']}\n\n{versions}, commit {about.get('commit')}; {units}.\n"
    judged = [row for row in rows_of(found, "right") if row.get("right") is not None]
    wrong = [row for row in judged if not row["right"]]
    yield f"{len(judged) - len(wrong)} of {len(judged)} comparisons are right.\n"
    yield "".join(f"- not right: `{json.dumps(row)[:300]}`\n" for row in wrong)
    for stage, columns in COLUMNS.items():
        rows = [row for row in rows_of(found, stage) if "ms" in row]
        yield table(BESIDE[stage](rows) if stage in BESIDE else rows, columns)
    said = [f"{failure['task'].removeprefix('gpu:')}: {failure['line']}" for failure in found["failed"]]
    said += [f"for want of time: {', '.join(found['left_out'])}"] * bool(found["left_out"])
    yield "\n".join(f"- {line}" for line in said) + "\n"
