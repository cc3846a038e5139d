"""Tables of timed rows: decode steps and prompts, attention alone, and our methods beside kvpress's.

Rows of steps are of a `kind`: "" for ordinary steps, "weights" (narrow ones) or "prompt" (the time of a whole
prompt); the file's rows with another batch or number of layers are in no table.
"""

from __future__ import annotations

import pandas

from . import tables
from .peers import DIFFERS, SIDES

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


def kernels(simd: str, tokens: str) -> str:
    """Attention alone over so many tokens, compiled for these instructions, formats by heads: the share of
    the read bandwidth, and how many times as fast as fp32 sdpa."""
    rows = [row for row in tables.study("attention") if row["simd"] == simd and row["tokens"] == int(tokens)]
    rows = [row for row in rows if not row["kernel"].endswith("-decode")]
    if not rows:
        return tables.not_made("python -m eval attention")
    cells = [
        (f"`{row['kernel']}`", row["shape"], f"{row['fraction_of_bandwidth']:.0%} ({row['speedup']:.1f})")
        for row in rows
    ]
    one, read = rows[0], [row["bandwidth_gbps"] for row in rows]
    threads = "one thread" if one["threads"] == 1 else f"{one['threads']} threads added up"
    note = (
        f"{one['machine']}, {one['simd']}, torch {one['torch']}; medians of CPU time of {threads}, which "
        f"read {min(read):.1f} to {max(read):.1f} GB/s; made {one['made'][:10]}, code {one['code_digest']}."
    )
    shapes = dict.fromkeys(row["shape"] for row in rows)
    head = f"{int(tokens):,} tokens: of the bandwidth (over sdpa)"
    return tables.markdown([head], tables.grid(cells, shapes), note)


def pairs(model: str) -> str:
    """One model's methods beside those of kvpress: a line for each pair, means over tasks and protocols."""
    rows = [row for row in tables.study("peers") if row["model"] == model]
    if not rows:
        return tables.not_made("make peers")
    flat = pandas.json_normalize(rows)  # ours.value, theirs.value, ...
    methods = flat.groupby("method", sort=False)
    count, weighed = methods["n"].sum(), flat.apply(pandas.to_numeric, errors="coerce").mul(flat["n"], axis=0)
    sums = weighed.groupby(flat["method"], sort=False).agg(lambda column: column.sum(skipna=False))
    means = sums.div(count, axis=0)

    def both(name: str, unit: float, digits: int) -> pandas.Series:
        sides = [(unit * means[f"{side}.{name}"]).map(f"{{:.{digits}f}}".format) for side in SIDES]
        return (sides[0] + " / " + sides[1]).mask(means[f"theirs.{name}"].isna(), "–")

    percent = lambda name, digits: means[name].mul(100).map(f"{{:.{digits}f}} %".format)
    body = pandas.DataFrame({
        "kvpress": methods["press"].first().map("`{}`".format),
        "held alike": percent("alike", 1), "heads the same": percent("same_heads", 1),
        "but for the newest": percent("but_newest", 1),
        "log-probabilities apart": means["apart"].map("{:.2g}".format),
        "same answer": percent("same_answer", 0),
        "right": both("value", 100, 0) + (50 / count**0.5).map(" ± {:.0f}".format),
        "prefill, CPU ms": both("prefill", 1e3, 0), "step, CPU ms": both("step", 1e3, 1),
        "cache, KB": both("bytes", 1e-3, 0), "peak, MB": both("peak", 1e-6, 1),
        "why they differ": means.index.map(lambda method: DIFFERS.get(method, "")),
    })  # fmt: skip
    counts = ", ".join(
        f"{task}, {protocol} {row['n']} ({row['tokens']} tokens, {row['kept']:g} held)"
        for (task, protocol), row in {(row["task"], row["protocol"]): row for row in rows}.items()
    )
    one = rows[0]
    note = (
        f"{model} (digest {one['model_digest']}), float32, one thread; documents: "
        f"{counts}; {one['machine']}, torch {one['torch']}, code {one['code_digest']}."
    )
    return tables.markdown(["ours"], body.rename("`{}`".format), note)
