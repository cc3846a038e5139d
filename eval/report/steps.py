"""Steps: decode steps beside llama.cpp's and transformers', collected in one file, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvlab import plots

from .plots import save
from .rows import provenance

ABOUT = (
    "Decode steps of llama.cpp, of transformers' caches and of kvlab's engines, timed in turn in one process"
)
AGAINST = (  # whose step is divided by whose
    ("kvlab, compiled: full", "llama.cpp: f32"),
    ("kvlab, compiled: int8", "llama.cpp: q8_0"),
    ("kvlab, compiled: int4", "llama.cpp: q4_0"),
    ("kvlab, compiled: full", "transformers: hf-dynamic"),
    ("kvlab, compiled: int8", "transformers: hf-quantized"),
    ("kvlab, compiled: h2o:budget=0.2", "kvlab, compiled: full"),
)


DRAWN = {  # whose steps the picture shows, in which colour
    "llama.cpp: f32": plots.INK,
    "transformers: hf-dynamic": plots.VERMILLION,
    "kvlab, eager: full": plots.GREEN,
    "kvlab, compiled: full": plots.BLUE,
    "kvlab, compiled: int8": plots.ORANGE,
}


def rows(cells: Iterable[dict]) -> list[dict]:
    """The rows of these cells, each with all that it stands on."""
    found = []
    for cell in sorted(cells, key=lambda cell: (cell["model"] != "workshop", context_of(cell))):
        shared = {"model": cell["model"], "simd": cell["about"]["simd"]} | provenance(cell, "text")
        shared |= {name: cell["about"].get(name) for name in ("weight_bytes", "compiled", "batch", "layers")}
        shared["shape"] = cell["task"].split(":")[1:-1]
        found += [shared | row for row in cell["rows"]]
    return found


def lines(cells: list[dict]) -> list[str]:
    """One line for every row of these cells."""
    return [
        f"{', '.join([cell['model'], *cell['task'].split(':')[1:-1]])}, {row['context']} tokens, "
        f"threads {row['threads']}, "
        f"{row['engine']}: {row['method']}: "
        f"CPU {quartiles(row, 'cpu_ms')} ms, wall {quartiles(row, 'wall_ms')} ms, "
        f"{100 * row['fraction']:.0f} % of bandwidth"
        for cell in cells
        for row in cell["rows"]
    ]


def context_of(cell: dict) -> int:
    return int(cell["task"].rpartition(":")[2])


def named(row: dict) -> str:
    """Who steps with which cache; llama.cpp's two ways to attend are one."""
    return f"{row['engine']}: {row['method'].partition(', flash')[0]}"


def fastest(rows: list[dict], model: str, threads: int) -> dict[str, dict[int, dict]]:
    """{name: {context: row}}; of llama.cpp with and without flash attention the faster one, by CPU time on
    one thread and by the clock on several."""
    clock, found = "cpu_ms" if threads == 1 else "wall_ms", {}
    for row in rows:
        if row["model"] == model and row["threads"] == threads and not row.get("shape"):
            mine = found.setdefault(named(row), {})
            if row["context"] not in mine or row[clock] < mine[row["context"]][clock]:
                mine[row["context"]] = row
    return found


def quartiles(row: dict, clock: str) -> str:
    """Median and quartiles."""
    return f"{row[clock]:.2f} ({row[f'{clock}_low']:.2f}–{row[f'{clock}_high']:.2f})"


def times(rows: list[dict], model: str, threads: str) -> tuple[list[str], list[list[str]]]:
    """Head and body: engines and caches by tokens held, ms of a step with its quartiles."""
    found = fastest(rows, model, int(threads))
    contexts = sorted({context for mine in found.values() for context in mine})
    clock = "cpu_ms" if threads == "1" else "wall_ms"
    head = ["a step, ms: median (quartiles)", *(f"{context:,} tokens" for context in contexts)]
    body = [
        [name, *(quartiles(mine[c], clock) if c in mine else "–" for c in contexts)]
        for name, mine in found.items()
    ]
    return head, body


def bandwidths(rows: list[dict], model: str, threads: str) -> tuple[list[str], list[list[str]]]:
    """Head and body: GB/s that a step reads, and what part of the measured read bandwidth that is."""
    found = fastest(rows, model, int(threads))
    contexts = sorted({context for mine in found.values() for context in mine})
    head = ["read per second, GB (of bandwidth)", *(f"{context:,} tokens" for context in contexts)]
    body = [
        [
            name,
            *(
                f"{mine[c]['gbps']:.1f} ({100 * mine[c]['fraction']:.0f} %)" if c in mine else "–"
                for c in contexts
            ),
        ]
        for name, mine in found.items()
    ]
    return head, body


def ratios(rows: list[dict], threads: str) -> tuple[list[str], list[list[str]]]:
    """Head and body: time of one step over that of another, for every model and number of tokens."""
    clock = "cpu_ms" if threads == "1" else "wall_ms"
    columns = dict.fromkeys((row["model"], row["context"]) for row in rows if not row.get("shape"))
    found = {model: fastest(rows, model, int(threads)) for model, _ in columns}
    head = ["time of a step / time of another", *(f"{model}, {context:,}" for model, context in columns)]
    body = []
    for mine, other in AGAINST:
        line = [f"{mine} / {other}"]
        for model, context in columns:
            pair = [found[model].get(name, {}).get(context) for name in (mine, other)]
            line.append(f"{pair[0][clock] / pair[1][clock]:.2f}" if all(pair) else "–")
        body.append(line)
    return head, body


def growth(rows: list[dict], what: str) -> dict[str, list[tuple[int, float]]]:
    """{name: [(how many, ms of a step)]} of the workshop model against `what`: tokens (`context`), rows
    (`batch`), `layers` or `threads`, at the fewest tokens measured where it is not against tokens. CPU time
    of one thread; against threads wall time."""
    mine = [row for row in rows if row["model"] == "workshop"]
    fewest = min((row["context"] for row in mine), default=0)
    mine = [row for row in mine if all(each.startswith(f"{what}=") for each in row.get("shape") or ())]
    if what != "context":
        mine = [row for row in mine if row["context"] == fewest]
    clock = "wall_ms" if what == "threads" else "cpu_ms"
    found = {}
    for row in mine:
        if (what == "threads" or row["threads"] == 1) and row.get(what) and named(row) in DRAWN:
            points = found.setdefault(named(row), {})
            points[row[what]] = min(row[clock], points.get(row[what], row[clock]))
    return {name: sorted(points.items()) for name, points in found.items() if len(points) > 1}


def draw(rows: list[dict], folder: Path) -> None:
    """Draw how a step's time grows with tokens, rows, layers and threads, as far as that was measured, as
    `speed.png`."""
    heads = {"context": "tokens held", "batch": "rows", "layers": "layers", "threads": "threads (wall time)"}
    grown = {what: found for what in heads if (found := growth(rows, what))}
    if not grown:
        return
    figure, panels = plots.canvas(3.2 * len(grown), 3.4, len(grown))
    for axes, (what, found) in zip(panels, grown.items(), strict=True):
        for name, points in found.items():
            axes.plot(*zip(*points, strict=True), marker="o", color=DRAWN[name], label=name)
        axes.set(xlabel=heads[what], ylabel="ms of a step", xscale="log", ylim=(0, None))
        sizes = sorted({size for points in found.values() for size, _ in points})
        axes.set_xticks(sizes, [f"{size // 1024}k" if size >= 1024 else str(size) for size in sizes])
        axes.minorticks_off()
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, folder / "speed", "png")


def stands_on(rows: list[dict]) -> str:
    """One paragraph: what these numbers are of."""
    rows = [row for row in rows if not row.get("shape")]
    one = rows[0]
    bandwidth = dict.fromkeys((row["threads"], round(row["bandwidth_gbps"], 1)) for row in rows)
    read = ", ".join(f"{gbps} ({threads})" for threads, gbps in bandwidth)
    return (
        f"{one['machine']}, {one['simd']}, torch {one['torch']}, weights in fp32 "
        f"({one['weight_bytes'] / 1e6:.1f} MB); CPU time on one thread, wall time on two; read bandwidth in "
        f"GB/s (threads): {read}; made {one['made'][:10]}, "
        f"code {', '.join(dict.fromkeys(row['code_digest'] for row in rows))}."
    )
