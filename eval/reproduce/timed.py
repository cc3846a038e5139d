"""Tables of timed rows: decode steps and prompts, attention alone, and our methods beside kvpress's.

Rows of steps are of a `kind`: "" for steps as they are, or what sets them apart: "weights" (narrow ones),
"prompt" (the time of a whole prompt); of rows with another batch or number of layers, which stand in the file
besides, no table is made.
"""

from __future__ import annotations

from math import sqrt

from ..core.table import Table
from .peers import DIFFERS

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
LEVELS = ("AVX512", "AVX2")  # what torch says that a processor can; tables show the first, or the one named
SETS = ("alike", "same_heads", "but_newest")


def speed(rows: list[dict], what: str, *arguments: str) -> Table:
    """Decode steps beside llama.cpp's and transformers': `times` and `bandwidths` MODEL THREADS, `ratios`
    THREADS; then the kind of rows, where it is not steps as they are; then what the processor can, where
    that is not the first of `LEVELS`."""
    *said, last = arguments
    level, said = (last, said) if last in LEVELS else (LEVELS[0], arguments)
    model = said[0] if what != "ratios" else None
    threads, kind = (*said[model is not None :], "")[:2]
    clock = "cpu_ms" if threads == "1" else "wall_ms"
    rows = [row for row in rows if row["simd"] == level and kind_of(row) == kind]
    rows = [row for row in rows if model in (None, row["model"])]
    if not rows:
        return Table([], [])
    at: dict[tuple, dict] = {}  # of llama.cpp with and without flash attention the faster one
    for row in rows:
        if row["threads"] == int(threads):
            key = row["model"], f"{row['engine']}: {row['method'].partition(', flash')[0]}", row["context"]
            at[key] = min(at.get(key, row), row, key=lambda one: one[clock])
    if what == "ratios":
        columns = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
        body = []
        for pair in AGAINST[kind]:
            both = [[at.get((model, name, context)) for name in pair] for model, context in columns]
            texts = (f"{one[clock] / other[clock]:.2f}" if one and other else "–" for one, other in both)
            body.append([" / ".join(pair), *texts])
        whose = "a prompt" if kind == "prompt" else "a step"
        head = [f"time of {whose} / time of another", *(f"{model}, {n:,}" for model, n in columns)]
        return Table(head, body, note=stands_on(rows))
    if what == "bandwidths":
        first, text = "read per second, GB (of bandwidth)", lambda row: bandwidth(row)
    else:
        whose, unit, scale = ("a prompt", "s", 1e-3) if kind == "prompt" else ("a step", "ms", 1)
        first, text = f"{whose}, {unit}: median (quartiles)", lambda row: quartiles(row, clock, scale)
    contexts = sorted({context for *_, context in at})
    names = dict.fromkeys(name for _, name, _ in at)
    body = [[name, *(text(at.get((model, name, context))) for context in contexts)] for name in names]
    head = [first, *(f"{context:,} tokens" for context in contexts)]
    return Table(head, body, note=stands_on([at[key] for name in names for key in at if key[1] == name]))


def kind_of(row: dict) -> str:
    """See above."""
    return (row.get("shape") or [""])[0].partition("=")[0]


def quartiles(row: dict | None, clock: str, scale: float = 1) -> str:
    """Median and quartiles, times `scale`."""
    if row is None:
        return "–"
    middle, low, high = (f"{scale * row[f'{clock}{part}']:.2f}" for part in ("", "_low", "_high"))
    return f"{middle} ({low}–{high})"


def bandwidth(row: dict | None) -> str:
    """GB/s that a step reads, and what part of the measured read bandwidth that is."""
    return "–" if row is None else f"{row['gbps']:.1f} ({100 * row['fraction']:.0f} %)"


def stands_on(rows: list[dict]) -> str:
    """One paragraph: what these steps are of."""
    one = rows[0]
    reads = dict.fromkeys((row["threads"], round(row["bandwidth_gbps"], 1)) for row in rows)
    read = ", ".join(f"{gbps} ({threads})" for threads, gbps in reads)
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


def lines(rows: list[dict]) -> list[str]:
    """One line for every row of steps."""
    return [
        f"{', '.join([row['model'], *row['shape']])}, {row['context']} tokens, "
        f"threads {row['threads']}, {row['engine']}: {row['method']}: "
        f"CPU {quartiles(row, 'cpu_ms')} ms, wall {quartiles(row, 'wall_ms')} ms"
        + (f", {100 * row['fraction']:.0f} % of bandwidth" if "fraction" in row else "")
        for row in rows
    ]


def kernels(rows: list[dict], simd: str, tokens: str) -> Table:
    """Attention alone over so many tokens, compiled for these instructions, formats by heads: the share of
    the read bandwidth, and how many times as fast as fp32 sdpa."""
    rows = [row for row in rows if row["simd"] == simd and row["tokens"] == int(tokens)]
    rows = [row for row in rows if not row["kernel"].endswith("-decode")]
    at = {
        (row["kernel"], row["shape"]): f"{row['fraction_of_bandwidth']:.0%} ({row['speedup']:.1f})"
        for row in rows
    }
    shapes, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("shape", "kernel"))
    body = [[f"`{name}`", *(at.get((name, shape), "–") for shape in shapes)] for name in names]
    head = [f"{int(tokens):,} tokens: of the bandwidth (over sdpa)", *shapes]
    if not rows:
        return Table(head, [])
    one, read = rows[0], [row["bandwidth_gbps"] for row in rows]
    note = (
        f"{one['machine']}, {one['simd']}, torch {one['torch']}; medians of CPU time of "
        f"{of_threads(one['threads'])}, which read {min(read):.1f} to {max(read):.1f} GB/s; "
        f"made {one['made'][:10]}, code {one['code_digest']}."
    )
    return Table(head, body, note=note)


def attention(rows: list[dict]) -> list[Table]:
    """The same with times, a table for each shape of heads."""
    head = ("kernel", "tokens", "bits", "ms", "quartiles", "MB", "of bandwidth", "speed-up")
    found = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        body = [
            [
                row["kernel"], f"{row['tokens']:,}", f"{row['bits']:.2f}", f"{row['ms']:.2f}",
                f"{row['ms_low']:.2f}–{row['ms_high']:.2f}", f"{row['bytes'] / 1e6:.1f}",
                f"{row['fraction_of_bandwidth']:.0%}", f"{row['speedup']:.1f}×",
            ]
            for row in mine
        ]  # fmt: skip
        title = f"decode attention, {shape}, CPU time of {of_threads(mine[0]['threads'])}"
        found.append(Table(head, body, title, f"{mine[0]['machine']}, {mine[0]['simd']}"))
    return found


def of_threads(threads: int) -> str:
    """Whose CPU time it is."""
    return "one thread" if threads == 1 else f"{threads} threads added up"


def pairs(rows: list[dict], model: str) -> Table:
    """One model's methods beside those of kvpress: a line for each pair, means over tasks and protocols."""
    head = [
        "ours", "kvpress", "held alike", "heads the same", "but for the newest", "log-probabilities apart",
        "same answer", "right", "prefill, CPU ms", "step, CPU ms", "cache, KB", "peak, MB", "why they differ",
    ]  # fmt: skip
    rows = [row for row in rows if row["model"] == model]
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        n = sum(row["n"] for row in mine)

        def mean(name: str, side: str | None = None, mine=mine, n=n) -> float:
            return sum((row[side] if side else row)[name] * row["n"] for row in mine) / n

        def both(name: str, unit: float, digits: int, mean=mean, mine=mine) -> str:
            if any(row[side][name] is None for row in mine for side in ("ours", "theirs")):
                return "–"
            return " / ".join(f"{mean(name, side) * unit:.{digits}f}" for side in ("ours", "theirs"))

        body.append([
            f"`{method}`", f"`{mine[0]['press']}`", *(f"{100 * mean(name):.1f} %" for name in SETS),
            f"{mean('apart'):.2g}", f"{100 * mean('same_answer'):.0f} %",
            f"{both('value', 100, 0)} ± {100 * sqrt(0.25 / n):.0f}", both("prefill", 1e3, 0),
            both("step", 1e3, 1), both("bytes", 1e-3, 0), both("peak", 1e-6, 1), DIFFERS.get(method, ""),
        ])  # fmt: skip
    if not rows:
        return Table(head, [])
    counts = ", ".join(
        f"{task}, {protocol} {row['n']} ({row['tokens']} tokens, {row['kept']:g} held)"
        for (task, protocol), row in {(row["task"], row["protocol"]): row for row in rows}.items()
    )
    one = rows[0]
    note = (
        f"{model} (digest {one['model_digest']}), float32, one thread; documents: "
        f"{counts}; {one['machine']}, torch {one['torch']}, code {one['code_digest']}."
    )
    return Table(head, body, note=note)
