"""Tables of timed rows: decode steps and prompts.

Rows of steps are of a `kind`: "" for ordinary steps, "weights" (narrow ones) or "prompt" (the time of a whole
prompt); the file's rows with another batch or number of layers are in no table.
"""

from __future__ import annotations

from . import tables

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


def speed(what: str, *arguments: str) -> str:
    """Decode steps beside llama.cpp's and transformers': `times` and `bandwidths` MODEL THREADS, `ratios`
    THREADS; then the kind of rows, where it is not steps as they are; then what the processor can, where
    that is not the first of `LEVELS`."""
    *said, last = arguments
    level, said = (last, said) if last in LEVELS else (LEVELS[0], arguments)
    model = said[0] if what != "ratios" else None
    threads, kind = (*said[model is not None :], "")[:2]
    clock = "cpu_ms" if threads == "1" else "wall_ms"
    rows = [row for row in tables.study("speed") if row["simd"] == level and kind_of(row) == kind]
    rows = [row for row in rows if model in (None, row["model"])]
    if not rows:
        return tables.not_made("make bench PEERS=1")
    at: dict[tuple, dict] = {}  # of llama.cpp with and without flash attention the faster one
    for row in rows:
        if row["threads"] == int(threads):
            key = row["model"], f"{row['engine']}: {row['method'].partition(', flash')[0]}", row["context"]
            at[key] = min(at.get(key, row), row, key=lambda one: one[clock])
    if what == "ratios":
        columns = {f"{row['model']}, {row['context']:,}": (row["model"], row["context"]) for row in rows}
        cells = []
        for pair in AGAINST[kind]:
            for title, (whose, context) in columns.items():
                ours, theirs = (at.get((whose, name, context)) for name in pair)
                text = f"{ours[clock] / theirs[clock]:.2f}" if ours and theirs else None
                cells.append((" / ".join(pair), title, text))
        head = f"time of {'a prompt' if kind == 'prompt' else 'a step'} / time of another"
        return tables.markdown([head], tables.grid(cells, columns), stands_on(rows))
    if what == "bandwidths":
        head = "read per second, GB (of bandwidth)"
        text = lambda row: f"{row['gbps']:.1f} ({100 * row['fraction']:.0f} %)"
    else:
        whose, unit, scale = ("a prompt", "s", 1e-3) if kind == "prompt" else ("a step", "ms", 1)
        head, text = f"{whose}, {unit}: median (quartiles)", lambda row: quartiles(row, clock, scale)
    cells = [(name, f"{context:,} tokens", text(row)) for (_, name, context), row in at.items()]
    columns = [f"{context:,} tokens" for context in sorted({context for *_, context in at})]
    names = dict.fromkeys(name for _, name, _ in at)
    note = stands_on([at[key] for name in names for key in at if key[1] == name])
    return tables.markdown([head], tables.grid(cells, columns), note)


def kind_of(row: dict) -> str:
    """See above."""
    return (row.get("shape") or [""])[0].partition("=")[0]


def quartiles(row: dict, clock: str, scale: float) -> str:
    """Median and quartiles, times `scale`."""
    middle, low, high = (f"{scale * row[f'{clock}{part}']:.2f}" for part in ("", "_low", "_high"))
    return f"{middle} ({low}–{high})"


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
