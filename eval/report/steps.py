"""Steps: decode steps and prompts beside llama.cpp's and transformers', collected in one file, as tables.

Rows are of a `kind`: "" for steps as they are, or what sets them apart: "weights" (narrow ones), "batch",
"layers", "prompt" (the time of a whole prompt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kvlab import plots

from .plots import save
from .rows import provenance

ABOUT = (
    "Decode steps and prompts of llama.cpp, of transformers' caches and of kvlab's engines, timed in turn in "
    "one process"
)
AGAINST = {  # kind of rows -> whose time is divided by whose
    "": (
        ("kvlab, compiled: full", "llama.cpp: f32"),
        ("kvlab, compiled: int8", "llama.cpp: q8_0"),
        ("kvlab, compiled: int4", "llama.cpp: q4_0"),
        ("kvlab, compiled: full", "transformers: hf-dynamic"),
        ("kvlab, compiled: int8", "transformers: hf-quantized"),
        ("kvlab, compiled: h2o:budget=0.2", "kvlab, compiled: full"),
    ),
    "weights": tuple(
        (f"kvlab, compiled, {ours} weights: {method}", f"llama.cpp, {theirs} weights: {kind}")
        for ours, theirs in (("bf16", "bf16"), ("int8", "q8_0"))
        for method, kind in (("full", "f32"), ("int8", "q8_0"), ("int4", "q4_0"))
    ),
    "prompt": (
        ("kvlab, compiled: full", "llama.cpp: f32"),
        ("kvlab, compiled: full", "transformers: hf-dynamic"),
        ("kvlab, compiled: int8", "kvlab, compiled: full"),
        ("kvlab, compiled: h2o:budget=0.2", "kvlab, compiled: full"),
        ("kvlab, compiled: snapkv:budget=0.2", "kvlab, compiled: full"),
    ),
}
LEVELS = ("AVX512", "AVX2")  # what torch says that a processor can; tables and the picture show the first
DRAWN = (  # whose steps the picture shows
    "llama.cpp: f32", "transformers: hf-dynamic", "kvlab, eager: full", "kvlab, compiled: full",
    "kvlab, compiled: int8",
)  # fmt: skip


def rows(cells: Iterable[dict]) -> list[dict]:
    """The rows of these cells, each with all that it stands on."""
    found = []
    for cell in sorted(cells, key=lambda cell: (cell["model"] != "workshop", context_of(cell))):
        shared = {"model": cell["model"], "simd": cell["about"]["simd"]} | provenance(cell, "text")
        shared |= {name: cell["about"].get(name) for name in ("compiled", "batch", "layers")}
        shared["shape"] = cell["task"].split(":")[1:-1]
        found += [shared | row for row in cell["rows"]]
    return found


def of_level(rows: list[dict], simd: str = LEVELS[0]) -> list[dict]:
    """Those that were measured on a processor that can this and no more."""
    return [row for row in rows if row["simd"] == simd]


def lines(cells: list[dict]) -> list[str]:
    """One line for every row of these cells."""
    return [
        f"{', '.join([cell['model'], *cell['task'].split(':')[1:-1]])}, {row['context']} tokens, "
        f"threads {row['threads']}, {row['engine']}: {row['method']}: "
        f"CPU {quartiles(row, 'cpu_ms')} ms, wall {quartiles(row, 'wall_ms')} ms"
        + (f", {100 * row['fraction']:.0f} % of bandwidth" if "fraction" in row else "")
        for cell in cells
        for row in cell["rows"]
    ]


def context_of(cell: dict) -> int:
    return int(cell["task"].rpartition(":")[2])


def named(row: dict) -> str:
    """Who steps with which cache; llama.cpp's two ways to attend are one."""
    return f"{row['engine']}: {row['method'].partition(', flash')[0]}"


def kind_of(row: dict) -> str:
    """See above."""
    return (row.get("shape") or [""])[0].partition("=")[0]


def clock_of(threads: str) -> str:
    """CPU time on one thread, time by the clock on several."""
    return "cpu_ms" if threads == "1" else "wall_ms"


def fastest(rows: list[dict], kind: str, model: str, threads: str) -> dict[str, dict[int, dict]]:
    """{name: {context: row}} of a kind; of llama.cpp with and without flash attention the faster one."""
    clock, found = clock_of(threads), {}
    for row in rows:
        if row["model"] == model and row["threads"] == int(threads) and kind_of(row) == kind:
            mine = found.setdefault(named(row), {})
            if row["context"] not in mine or row[clock] < mine[row["context"]][clock]:
                mine[row["context"]] = row
    return found


def quartiles(row: dict, clock: str, scale: float = 1) -> str:
    """Median and quartiles, times `scale`."""
    middle, low, high = (f"{scale * row[f'{clock}{part}']:.2f}" for part in ("", "_low", "_high"))
    return f"{middle} ({low}–{high})"


Table = tuple[list[str], list[list[str]], list[dict]]  # head, body, and the rows that it is made of


def table(head: str, found: dict[str, dict[int, dict]], cell: Callable[[dict], str]) -> Table:
    """Engines and caches by tokens."""
    contexts = sorted({context for mine in found.values() for context in mine})
    body = [
        [name, *(cell(mine[context]) if context in mine else "–" for context in contexts)]
        for name, mine in found.items()
    ]
    used = [row for mine in found.values() for row in mine.values()]
    return [head, *(f"{context:,} tokens" for context in contexts)], body, used


def times(rows: list[dict], model: str, threads: str, kind: str = "") -> Table:
    """Time of a step, or of a prompt, with its quartiles."""
    what, unit, scale = ("a prompt", "s", 1e-3) if kind == "prompt" else ("a step", "ms", 1)
    head = f"{what}, {unit}: median (quartiles)"
    return table(
        head, fastest(rows, kind, model, threads), lambda row: quartiles(row, clock_of(threads), scale)
    )


def bandwidths(rows: list[dict], model: str, threads: str, kind: str = "") -> Table:
    """GB/s that a step reads, and what part of the measured read bandwidth that is."""

    def cell(row: dict) -> str:
        return f"{row['gbps']:.1f} ({100 * row['fraction']:.0f} %)"

    return table("read per second, GB (of bandwidth)", fastest(rows, kind, model, threads), cell)


def ratios(rows: list[dict], threads: str, kind: str = "") -> Table:
    """Time of one step, or prompt, over that of another, for every model and number of tokens."""
    mine = [row for row in rows if kind_of(row) == kind]
    columns = dict.fromkeys((row["model"], row["context"]) for row in mine)
    found = {model: fastest(rows, kind, model, threads) for model, _ in columns}
    what, clock, body = "a prompt" if kind == "prompt" else "a step", clock_of(threads), []
    for one, other in AGAINST[kind] if mine else ():
        line = [f"{one} / {other}"]
        for model, context in columns:
            pair = [found[model].get(name, {}).get(context) for name in (one, other)]
            line.append(f"{pair[0][clock] / pair[1][clock]:.2f}" if all(pair) else "–")
        body.append(line)
    head = [f"time of {what} / time of another", *(f"{model}, {context:,}" for model, context in columns)]
    return head, body, mine


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


def look(name: str) -> dict:
    """How an engine with a cache is drawn: as its method is, dotted and hollow where the engine is eager."""
    engine, _, method = name.partition(": ")
    colour, marker, line = plots.style(engine if engine == "llama.cpp" else method)
    found = {"color": colour, "marker": marker, "linestyle": line}
    return found | ({"linestyle": ":", "markerfacecolor": "white"} if engine == "kvlab, eager" else {})


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
            axes.plot(*zip(*points, strict=True), label=name, **look(name))
        axes.set(xlabel=heads[what], ylabel="ms of a step", xscale="log", ylim=(0, None))
        sizes = sorted({size for points in found.values() for size, _ in points})
        axes.set_xticks(sizes, [f"{size // 1024}k" if size >= 1024 else str(size) for size in sizes])
        axes.minorticks_off()
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, folder / "speed", "png")


def stands_on(rows: list[dict]) -> str:
    """One paragraph: what these numbers are of."""
    one = rows[0]
    bandwidth = dict.fromkeys((row["threads"], round(row["bandwidth_gbps"], 1)) for row in rows)
    read = ", ".join(f"{gbps} ({threads})" for threads, gbps in bandwidth)
    held: dict[str, dict] = {}
    for row in rows:
        held.setdefault(row.get("weights", "fp32"), {})[f"{row['weight_bytes'] / 1e6:.1f}"] = None
    weights = ", ".join(f"{kind} ({' and '.join(sizes)} MB)" for kind, sizes in held.items())
    return (
        f"{one['machine']}, {one['simd']}, torch {one['torch']}, weights in {weights}; CPU time on one "
        f"thread, wall time on two; read bandwidth in GB/s (threads): {read}; "
        f"made {', '.join(sorted({row['made'][:10] for row in rows}))}, "
        f"code {', '.join(dict.fromkeys(row['code_digest'] for row in rows))}."
    )
