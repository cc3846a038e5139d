"""Page: the marked tables of docs/gpu.md, from docs/results/gpu/*.json, machines one after the other.

What a table shows is the rows as a run wrote them; only ratios within a table are computed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ..core.digests import ROOT
from ..core.errors import Problem
from ..core.files import write_file
from ..core.table import markdown
from . import headline, step

NAMED = ("static", "full", "int8", "int4", "fp8", "h2o", "snapkv", "kivi2")  # in the table of steps
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
    makers = {"measured": measured, "steps": steps}
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


# Steps.


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
    names = dict.fromkeys(name for name, _ in found if name in NAMED or name.startswith("hf-"))
    rows = [[f"`{name}`", *(number(found.get((name, graph))) for graph in (False, True))] for name in names]
    about = newest["machine"]
    title = f"{about['device']}, commit {about.get('commit')}: a step, ms"
    return markdown([title, "eager", "as a graph"], rows) + "\n"


# What was measured.

COLUMNS = {  # stage -> keys of its rows; stored runs alone have what the simulator predicted, and its errors
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
