"""Pictures of docs/sources.md and docs/offloading.md: `python docs/figures/draw.py`, in the root."""

import json
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eval.studies.offload import AS_RUN, BY_ALPHA, OVERLAPPED, SPEEDUPS
from kvlab import plots
from kvlab.arithmetic import MACHINES, SHAPES, TIERS, batch_that_fits, kv_bytes, throughput
from tests.reference.definitions.attention import part, shares, weights


def tiers(machines: dict, marks: dict[str, float]) -> Figure:
    """Memories by how much they hold and how fast they give it: machine -> name -> `arithmetic.Tier`, a line
    for each machine; marks: label -> bytes, a dotted line each. Returns the figure."""
    axes = plots.canvas(8.8, 4.6)[1][0]
    with matplotlib.rc_context(plots.SETTINGS):
        for (machine, memories), (colour, marker, line) in zip(machines.items(), plots.OTHERS, strict=False):
            sizes, speeds = zip(*((one.size, one.bandwidth) for one in memories.values()), strict=True)
            axes.plot(sizes, speeds, color=colour, marker=marker, ls=line, lw=1, label=machine)
            for name, one in memories.items():
                axes.annotate(name, (one.size, one.bandwidth), xytext=(6, 5), textcoords="offset points",
                              color=colour)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="bytes it holds", ylabel="bytes per second")
        axes.margins(x=0.15, y=0.15)
        for label, size in marks.items():
            axes.axvline(size, color=plots.INK, lw=0.8, ls=":")
            axes.annotate(label, (size, 0.02), xycoords=("data", "axes fraction"), rotation=90,
                          xytext=(-3, 0), textcoords="offset points", ha="right", va="bottom")  # fmt: skip
        axes.grid(True)
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.14, 0.02))
    return axes.figure


def splits(rows: list[list[float]], parts: list[float]) -> Figure:
    """Flash-decoding: what every split makes of its own tokens, and the same once all are put together.

    rows: per split, its softmax over its own tokens, each summing to 1; parts: the part of the whole
    softmax that lies on each split. Returns the figure.
    """
    alone, together = plots.canvas(7.2, 3.6, heights=(1, 1))[1]
    looks = ("", "///", "...", "xxx")
    with matplotlib.rc_context(plots.SETTINGS | {"hatch.linewidth": 0.6}):
        start = 0
        for number, (own, share) in enumerate(zip(rows, parts, strict=True)):
            places = range(start, start + len(own))
            hatch = looks[number % len(looks)]
            drawn = {"color": "#d5d8dd", "hatch": hatch, "edgecolor": plots.INK, "linewidth": 0.4}
            alone.bar(places, own, **drawn)
            together.bar(places, [share * weight for weight in own], **drawn)
            middle = start + (len(own) - 1) / 2
            alone.text(middle, 1.02, "sum 1", transform=alone.get_xaxis_transform(), ha="center")
            together.text(middle, 1.02, f"sum {share:.2f}", transform=together.get_xaxis_transform(),
                          ha="center")  # fmt: skip
            start += len(own)
            for axes in (alone, together):
                if number < len(rows) - 1:
                    axes.axvline(start - 0.5, color=plots.INK, lw=0.8, ls=":")
        alone.set(ylabel="weight, alone", xticks=[])
        together.set(ylabel="weight, together", xlabel="token")
    return alone.figure


def heads_at(token: int, heads: int) -> Figure:
    """What each head holds while the `token`-th token is made: keys and values of those before, cached, and
    query, key and value of the newest, computed. Returns the figure."""
    figure, boxes = plots.canvas(9.2, 2.2, columns=heads // 2, heights=(1, 1))
    with matplotlib.rc_context(plots.SETTINGS):
        for head, axes in enumerate(boxes):
            for line, what in enumerate("qKV"):
                for column in range(token - 1 if what == "q" else 0, token):
                    colour = plots.ORANGE if column == token - 1 else plots.SKY
                    axes.add_patch(Rectangle((column + 0.05, line + 0.05), 0.9, 0.9, color=colour, lw=0))
            axes.set(xlim=(0, token), ylim=(3, 0), xticks=[], yticks=[0.5, 1.5, 2.5])
            axes.set_yticklabels("qKV" if head % (heads // 2) == 0 else [""] * 3, fontsize=9)
            axes.set_title(f"head {head + 1}", fontsize=9)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    return figure


def to_the_end(curves: dict[str, list[tuple[float, float]]], x: str, y: str) -> Figure:
    """Curves that end where something is used up: label -> points (x, y), the last of each marked with its
    numbers. Returns the figure."""
    axes = plots.canvas(8.4, 3.4)[1][0]
    with matplotlib.rc_context(plots.SETTINGS):
        for (label, points), (colour, marker, line) in zip(curves.items(), plots.OTHERS, strict=False):
            places, values = zip(*points, strict=True)
            axes.plot(places, values, color=colour, ls=line, label=label)
            axes.plot(places[-1], values[-1], color=colour, marker=marker, ls="")
            axes.annotate(f"{places[-1]:,}: {values[-1]:,.0f}", (places[-1], values[-1]), xytext=(-8, -8),
                          textcoords="offset points", va="top", color=colour)  # fmt: skip
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(0, 1.15 * max(value for points in curves.values() for _, value in points))
        axes.margins(x=0.14)
        axes.grid(True)
        axes.legend(frameon=False, loc="upper left")
    return axes.figure


def turnover(rows: list[dict]) -> Figure:
    """How a prompt's top tenth changes while decoding: of the first step's, and all that ever were in it."""
    axes = plots.canvas(7.2, 3.2)[1][0]
    with matplotlib.rc_context(plots.SETTINGS):
        for model, (colour, marker, _) in zip(("smollm2", "workshop"), plots.OTHERS, strict=False):
            for what, line in (("of the first step's", "-"), ("ever", "--")):
                label = f"{model}: the top tenth, {what}, at step "
                points = [(row["system"], row["value"]) for row in rows if row["system"].startswith(label)]
                steps, values = [int(name.rpartition(" ")[2]) for name, _ in points], [v for _, v in points]
                axes.plot(steps, values, color=colour, marker=marker, ls=line, label=f"{model}, {what}")
        axes.set(xscale="log", xlabel="decode step", ylabel="share", ylim=(0, 1.05))
        axes.set(xticks=[1, 2, 4, 8, 16, 32, 64, 128], xticklabels=[1, 2, 4, 8, 16, 32, 64, 128])
        axes.minorticks_off()
        axes.grid(True)
        axes.legend(frameon=False, loc="upper center", ncols=2, fontsize=8.5)
    return axes.figure


def latency(rows: list[dict], measured: dict[str, tuple[float, float]] | None = None):
    """Speed-ups by length and by model, and seconds of a prompt and its answer, simulated as the published
    numbers were run, which are beside it, and with overlap. measured: {system: (prefill, decode)} in seconds
    of a machine that was at hand."""
    figure, (left, right, models, bars) = plots.canvas(9.6, 7.0, 2, heights=(1, 1))
    by_length(left, rows, AS_RUN, BY_ALPHA)
    by_length(right, rows, OVERLAPPED)
    for row in rows:
        if row["published"] is not None and row["experiment"] == "latency":
            colour, marker, _ = plots.style(row["system"])
            left.plot(row["tokens"], row["published"], marker, color=colour, markerfacecolor="white")
    left.set_title("OPT-13B, batch 8: simulated as run (lines), published (open)", fontsize=10)
    right.set_title("OPT-13B, batch 8: simulated, overlapped", fontsize=10)

    sizes = ("OPT-6.7B", "OPT-13B", "OPT-30B")
    for name, value in matching(
        rows, *(f"faster than offload, {model}, batch 4, {AS_RUN.name}" for model in sizes)
    ):
        colour, marker, line = plots.style(name)
        models.plot(range(3), value, color=colour, marker=marker, ls=line, label=name)
    models.set(xticks=range(3), xticklabels=sizes, ylabel="times faster than FlexGen", ylim=(0, 5))
    models.set_title("2,048 tokens, batch 4: simulated as run", fontsize=10)

    wanted = [
        f"{part}, OPT-13B, batch 20, {run.name}"
        for run in (AS_RUN, OVERLAPPED)
        for part in ("prefill", "decode")
    ]
    seconds = dict(matching(rows, *wanted))
    names = [name for name in seconds if name != "full"]
    groups = [("simulated as run", [s[:2] for s in map(seconds.get, names)])]
    groups.append(("simulated, overlapped", [s[2:] for s in map(seconds.get, names)]))
    if measured:
        groups.append(("steps measured, H200, 16 GB/s", [measured.get(name, ()) for name in names]))
    for place, (label, values) in enumerate(groups):
        at = [x + 0.27 * (place - 1) for x in range(len(names))]
        bars.barh(at, [sum(value) for value in values], 0.25, color=GREYS[place], label=label)
        for y, total in zip(at, map(sum, values)):
            if total:
                bars.annotate(f"{total:.0f}", (total, y), xytext=(3, 0), textcoords="offset points",
                              va="center", fontsize=7.5)  # fmt: skip
    bars.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds", xscale="log", xlim=(5, 6000))
    bars.invert_yaxis()
    bars.set_title("OPT-13B, 20 rows of 1,920 + 128 tokens", fontsize=10)
    for axes in (left, right, models, bars):
        axes.grid(True, axis="x" if axes is bars else "y")
        axes.tick_params(labelsize=9)
        axes.xaxis.label.set_size(9)
        axes.yaxis.label.set_size(9)
        axes.legend(frameon=False, fontsize=8, loc="lower right" if axes is bars else "best")
    return figure


GREYS = ("#4c5b73", "#9aa7bb", "#d58b3a")


def matching(rows: list[dict], *labels: str) -> list[tuple[str, list[float]]]:
    """(system, values) of the systems that have a row with every label, in the labels' order."""
    found: dict[str, dict] = {}
    for row in rows:
        name, _, what = row["system"].partition(": ")
        if what in labels:
            found.setdefault(name, {})[what] = row["value"]
    return [
        (name, [one[label] for label in labels]) for name, one in found.items() if len(one) == len(labels)
    ]


def by_length(axes, rows: list[dict], *runs) -> None:
    """Speed-ups over FlexGen by the tokens in all; of the runs after the first, InfiniGen's, dotted."""
    for run in runs:
        lines: dict[str, dict] = {}
        for row in rows:
            name, _, what = row["system"].partition(": ")
            if what == f"faster than offload, OPT-13B, batch 8, {run.name}":
                lines.setdefault(name, {})[row["tokens"]] = row["value"]
        for name, points in lines.items():
            if run is not runs[0] and name != "infinigen":
                continue
            colour, marker, line = plots.style(name)
            label = name if run is runs[0] else f"{name}, alpha's counts on SmolLM2"
            line = line if run is runs[0] else ":"
            axes.plot(*zip(*points.items(), strict=True), color=colour, marker=marker, ls=line, label=label)
    lengths = sorted(SPEEDUPS["infinigen"])
    axes.set(
        xlabel="tokens",
        ylabel="times faster than FlexGen",
        ylim=(0, 10.5),
        xticks=lengths,
        xticklabels=lengths,
    )


if __name__ == "__main__":
    llama = SHAPES["Llama-2-7B"]
    marks = {
        "Llama-2-7B: one token, 0.5 MB": kv_bytes(llama, 1),
        "4,096 tokens, 2.1 GB": kv_bytes(llama, 4096),
    }
    tiers(TIERS, marks).savefig("docs/figures/memories.png", dpi=110)

    torch.manual_seed(3)
    query, keys, values = torch.randn(16), torch.randn(24, 16), torch.randn(24, 16)
    parts = [part(query, k, v, 0.25) for k, v in zip(keys.split(6), values.split(6), strict=True)]
    alone = [weights(query, k, 0.25).tolist() for k in keys.split(6)]
    splits(alone, shares(parts).tolist()).savefig("docs/figures/flash-decoding.png", dpi=110)

    heads_at(9, 12).savefig("docs/figures/heads.png", dpi=110)

    curves = {}
    for bits in (16, 8, 4):
        rows = range(1, 1 + batch_that_fits(SHAPES["Llama-7B"], 80e9, 2048, bits))
        machine = MACHINES["A100-PCIe4"]
        curves[f"{bits}-bit cache"] = [
            (b, throughput(machine, SHAPES["Llama-7B"], 2048, b, bits)) for b in rows
        ]
    figure = to_the_end(curves, x="rows of 2,048 tokens", y="tokens per second, at most")
    figure.savefig("docs/figures/throughput.png", dpi=110)

    rows = json.loads(Path("docs/results/offload.json").read_text())["rows"]
    runs = [
        json.loads(Path(f"docs/results/gpu/h200-{name}.json").read_text()) for name in ("61d36dd", "8192629")
    ]
    measured = {  # the later run's where there is one; none of H2O's, which a fault held up
        row["system"]: (row["prefill_s"], row["total_s"] - row["prefill_s"])
        for run in runs
        for row in run["units"]["headline:OPT-13B, 1920 tokens, batch 20"]["rows"]
        if row.get("link") == "throttled" and "h2o" not in row["system"]
    }
    latency(rows, measured).savefig("docs/figures/offload-latency.png", dpi=110)
    turnover(rows).savefig("docs/figures/turnover.png", dpi=110)
