"""Report: docs/gpu.md from docs/results/gpu/*.json, machines side by side; predictions where none has run.

What a table shows is the rows as a run wrote them; nothing is computed here but what is said of goals.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from kvlab.arithmetic import MACHINES

from ..core.files import write_file
from . import predict
from .goals import goals
from .tables import markdown, number, rows_of, timed

WITHOUT = """**None of this has run on a GPU yet.** The machines that kvlab is made on have none. Every
number marked *predicted* was computed by the simulator (`kvlab.measure.simulate`) from a data sheet;
nothing on this page is measured, and whatever else in the project speaks of GPUs stands on this page.
"""
HEAD = "# On a GPU\n"
NOT_YET = "# On a GPU: nothing here has run on one yet\n"
HOW = """## How to run it

```
python -m eval gpu                     # seven stages, at most nine minutes: results/gpu/gpu.json
python -m eval gpu --minutes 20        # everything, also what nine minutes have no room for
python -m eval gpu --stages right link # some stages
python -m eval gpu --dry               # all stages in small on a CPU, Triton interpreted
python -m eval gpu --pack FOLDER       # for a machine without a network; there: bash FOLDER/run
cp results/gpu/gpu.json docs/results/gpu/NAME.json && python -m eval gpu --report   # this page
```

What goals hang on comes first, in the order of the stages; then what completes the tables, and by estimate
both fit into nine minutes, compiling included. What does not is left out with a name: other models and
lengths of the stages attention and step, transformers' compiled step, the sanitizer. What is done is
kept: the same command goes on where it was interrupted. A part that fails, hangs
or finds too little memory says so in one line and the next one follows; the traceback is in `gpu.json`.

The pack holds kvlab, transformers' own wheel, and what that needs for Python 3.12, for a machine that
lacks it. It has what is installed where it is made: made beside a Triton of the version that the other
machine has, it holds the compiled kernels too, and they start at once; else they are compiled there, by
many processes. A model whose folder the variable `KVLAB_MODEL` names is taken along if it is small
enough. SmolLM2-135M, 98 MB in 4 bits, is not: without one the built-in models stand in the stage
accuracy. What is compiled there stays in a folder under `$TMPDIR` for the next run. The minutes count from
the moment that `run` is begun.

| stage | question |
|---|---|
| right | do kernels, methods and links say what they say on a CPU; does a decode step wait for the host |
| attention | what does decode attention over packed K and V take beside flash attention over bf16 |
| step | what does a whole decode step take, every method, beside transformers' caches |
| link | what crosses between host and device, and what of it does computation hide |
| headline | InfiniGen's experiment: seven systems, the real link and one of 16 GB/s, predictions beside |
| throughput | tokens per second against the batch, to the end of memory |
| accuracy | does a trained model answer and predict as on the CPU |

### What a number is

All contestants of a table were timed in one process, one call of each in turn, from an idle device to an
idle device; the median stands there, behind it the quarters below and above. Attention is timed in CUDA
graphs that hold a call for each of several copies of K and V, together many times the device's cache, so
that every call reads memory; ten replays follow each other, so that only the launch of the first one
counts. Beside flash attention stands the faster of two forms of it; the fastest of all that torch has,
its own choice and at 64k FlexAttention among it, has a column of its own. A step replayed as a graph
writes one slot again and again: it says what a step costs without launches, and is no decode loop.
Models have random weights and caches random numbers; a method that chooses tokens by an attention that
is nearly uniform chooses as many as its cap allows. The bandwidth under every fraction is that of a
large copy on the device in the same process, bytes read and written counted. The share of PCIe is of
what the generation and the lanes that nvidia-smi names carry in one direction.

### What there is no number for

Triton kernels exist for symmetric int8, int4 and int2 with scales for single tokens or groups of their
channels, and for fp8 (e5m2, and e4m3 from capability 8.9 on), at head dimensions that are multiples of 16, up
to 256; between powers of two, as 80, 96 and 160 are, lanes are idle. KIVI has kernels of its own at the same
head dimensions, used as soon as a block is written. There is none for other asymmetric integers, nor for
groups under 16 channels: these are decoded first, and then attended to.

A step of a kvlab cache is not offered to torch.compile: its counts of tokens are numbers of Python's,
and every step has others. Twelve steps of a small Llama (four layers, 96 tokens, torch 2.13 on two busy
cores of an Intel Xeon, a backend that only counts, without numba, which Dynamo does not get through)
compiled one graph with transformers' static cache, in the first step; with `static` twelve in the first
one and two more in each of the next seven, which took five seconds each, until torch's limit of
recompilations was reached and steps ran in pieces. What takes its place is a CUDA graph of the whole
step; transformers' own compiled static cache stands beside it.

A token that a quantized cache cannot store (NaN, infinity) is refused on a GPU when the next token
comes, since asking at once would make every step wait; a captured step does not ask.

These are suspicions that only a GPU can settle: whether copying all of K and V from pinned memory in one go
is faster than either way of `CudaLink`, which would make FlexGen's baseline faster; what the first step after
a prompt costs, in which host buffers are lengthened (it is not counted); and whether int8 kernels in fp32,
which spill registers, are of use. Pinned memory is held by torch's allocator until a run's process ends, and
what the host has free is asked of the system, not of a container's limit: a limit far below the machine's
memory may end the process at batch 20, and the next part follows.
"""


def write(docs: Path) -> str:
    """Write docs/gpu.md; returns what is to be said. Raises Problem for a file that cannot be read."""
    from ..core.errors import Problem
    from .pictures import drawn  # matplotlib, for the page alone

    if not docs.is_dir():
        raise Problem(f"--report: there is no folder {docs}; run it in a checkout of the project")
    machines = {}
    for file in sorted((docs / "results" / "gpu").glob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["dry"]:
                raise ValueError("it is of a dry run, which says nothing about a GPU")
            machines[file.stem] = found
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Problem(f"{file}: no gpu.json that can be shown ({error})") from None
    (docs / "figures").mkdir(exist_ok=True)
    shown = {name: drawn(name, found, docs / "figures") for name, found in machines.items()}
    write_file(docs / "gpu.md", page(machines, shown))
    return (
        f"{docs / 'gpu.md'}: {len(machines)} machines" if machines else f"{docs / 'gpu.md'}: predictions only"
    )


def page(machines: dict[str, dict], pictures: dict[str, list[str]] | None = None) -> str:
    """The page: {name: gpu.json}; pictures: lines of Markdown that show them, by name."""
    parts = [HEAD] if machines else [NOT_YET, WITHOUT]
    if machines:
        parts.append(table_of_machines(machines))
        parts.append(goals(machines))
        parts += [line for lines in (pictures or {}).values() for line in lines]
        parts += [part for make in STAGES for part in make(machines)]
        parts.append(failures(machines))
        parts.append(left_out(machines))
    else:
        parts.append(goals({}))
    parts += [predicted(), HOW]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def table_of_machines(machines: dict[str, dict]) -> str:
    rows = []
    for name, found in machines.items():
        about = found["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v and k in SHOWN)
        memory = f"{about['memory_bytes'] / 1e9:.0f} GB" if about.get("memory_bytes") else "–"
        units = f"{len(found['units'])} ({len(found['failed'])} failed, {len(found['left_out'])} left out)"
        rows.append([name, about["device"], memory, versions, about.get("commit") or "–", units])
    return markdown(["run", "device", "memory", "versions", "commit", "parts"], rows, 6)


SHOWN = ("torch", "triton", "transformers")


def right(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        rows = rows_of(found, "right")
        judged = [row for row in rows if row.get("right") is not None]
        wrong = [row for row in judged if not row["right"]]
        parts.append(f"{name}: {len(judged) - len(wrong)} of {len(judged)} comparisons are right.\n")
        parts += [f"- not right: `{json.dumps(row)[:300]}`\n" for row in wrong]
        waits = [row for row in rows if "by_name" in row and not row["offloads"]]
        if waits:
            heads = ["method", "times the host waits in a step", "layers"]
            parts.append(
                markdown(heads, [[f"`{w['method']}`", w.get("waits", "–"), w["layers"]] for w in waits])
            )
    return ["## Right\n", *parts] if parts else []


def attention(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        rows = [row for row in rows_of(found, "attention") if "ms" in row]
        table = [
            [row["shape"], f"{row['tokens']:,}", row["batch"], row["kernel"],
             timed(row), timed(row, "eager_"),
             number(row["gbps"]), f"{row['fraction']:.0%}", number(row["speedup"]),
             number(row.get("of_torch"))]
            for row in rows
        ]  # fmt: skip
        heads = ["heads of", "tokens", "batch", "kernel", "ms", "eager, ms", "GB/s", "of bandwidth",
                 "× flash", "× torch's fastest"]  # fmt: skip
        parts += [f"{name}:\n", markdown(heads, table)] if table else []
    return ["## Attention\n", *parts] if parts else []


def step(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        table = []
        for row in rows_of(found, "step"):
            times = [timed(row, f"{way}_") for way in ("eager", "graph", "compiled")]
            peak = row.get("peak_bytes")
            beside = [row.get(f"{way}_times_theirs") for way in ("eager", "graph")]
            table.append([
                row["model"], f"{row['tokens']:,}", row["batch"], f"`{row['method']}`", *times,
                "–" if peak is None else f"{peak / 1e9:.2f}", *map(number, beside),
                row.get("left_out", "")[:60],
            ])  # fmt: skip
        heads = ["model", "tokens", "batch", "method", "eager, ms", "graph, ms", "compiled, ms", "peak, GB",
                 "eager × theirs", "graph × theirs", "left out"]  # fmt: skip
        parts += [f"{name}:\n", markdown(heads, table)] if table else []
    return ["## A whole step\n", *parts] if parts else []


def link(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        table = [
            [next(str(row[key]) for key in ("copy", "overlap", "rows") if key in row),
             f"{size_of(row):,}", timed(row), number(row.get("gbps")),
             f"{row['fraction']:.0%}" if "fraction" in row else number(row.get("value")),
             f"{row['of_pcie']:.0%}" if "of_pcie" in row else "–"]
            for row in rows_of(found, "link")
        ]  # fmt: skip
        heads = ["what", "bytes", "ms", "GB/s", "of the largest", "of PCIe"]
        parts += [f"{name}:\n", markdown(heads, table)] if table else []
    return ["## The link\n", *parts] if parts else []


def size_of(row: dict) -> int:
    """Bytes that a row of the stage link carried."""
    return row.get("size") or row.get("bytes") or row["megabytes"] * 2**20


def headline(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        table, blocks = [], []
        for row in rows_of(found, "headline"):
            if "step_ms" not in row:
                continue
            guess = row.get("predicted", {}).get("step_ms")
            table.append([
                f"{row['prompt']:,}", row["batch"], row["link"], f"`{row['system']}`",
                number(row["prefill_s"]) + ("*" if row.get("prefill_modelled") else ""),
                timed({k.replace("step_ms", "ms"): v for k, v in row.items()}), number(row["total_s"]),
                number(row.get("faster")), number(row.get("of_ideal")), number(guess),
                *("–" if row.get(key) is None else f"{row[key]:+.0f} %" for key in ("error", "error_total")),
            ])  # fmt: skip
            if "block" in row:
                values = [number(value) for value in row["block"].values()]
                blocks.append(
                    [f"{row['prompt']:,}", row["batch"], row["link"], f"`{row['system']}`", *values]
                )
        heads = ["prompt", "batch", "link", "system", "prefill, s", "step, ms", "total, s", "× FlexGen",
                 "of ideal", "predicted, ms", "error, step", "error, total"]  # fmt: skip
        if table:
            parts += [f"{name}:\n", markdown(heads, table)]
        if blocks:
            heads = ["prompt", "batch", "link", "system", *(f"{part}, ms" for part in PARTS)]
            parts += ["One layer by part, the device waited for at every cut:\n", markdown(heads, blocks)]
    return ["## InfiniGen's experiment\n", MODELLED, *parts] if parts else []


MODELLED = """Two things in this table are modelled. `uvm` and `uvm+h2o` use no managed memory: pages are
counted and carried by the link as everywhere in kvlab; they cost nothing but their bytes on the real link,
which flatters them, and pay for their faults on the throttled one. A prompt's time with a star was not run
again on the throttled link: it is that of the real one, longer by what 16 GB/s cannot hide.
"""


PARTS = ("project", "attention", "ffn", "selection", "stall")


def throughput(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        table = [
            [row["model"], f"`{row['method']}`", row["batch"], number(row["step_ms"]),
             number(row["tokens_per_s"]), f"{row['bytes'] / 1e9:.2f}", "best" if row.get("best") else ""]
            for row in rows_of(found, "throughput")
        ]  # fmt: skip
        heads = ["model", "method", "batch", "step, ms", "tokens/s", "cache, GB", ""]
        parts += [f"{name}:\n", markdown(heads, table, 2)] if table else []
    return ["## Throughput\n", *parts] if parts else []


def accuracy(machines) -> list[str]:
    parts = []
    for name, found in machines.items():
        table = [
            [row["model"], f"`{row['method']}`", f"{row['answered']:.0%}", f"{row['answered_cpu']:.0%}",
             f"{row['loss']:.4f}", f"{row['loss_cpu']:.4f}", "yes" if row["right"] else "no"]
            for row in rows_of(found, "accuracy")
        ]  # fmt: skip
        heads = [
            "model",
            "method",
            "answered",
            "on the CPU",
            "loss, nats",
            "on the CPU",
            "equal within error",
        ]
        parts += [f"{name}:\n", markdown(heads, table, 2)] if table else []
    return ["## Accuracy\n", *parts] if parts else []


STAGES = (right, attention, step, link, headline, throughput, accuracy)


def failures(machines) -> str:
    lines = [
        f"- {name}, {failure['task'].removeprefix('gpu:')}: {failure['line']}"
        for name, found in machines.items()
        for failure in found["failed"]
    ]
    return "## What failed\n\n" + "\n".join(lines) + "\n" if lines else ""


def left_out(machines) -> str:
    """What has no numbers, what became smaller, and what was not begun, by part of a run."""
    lines = []
    for name, found in machines.items():
        for unit, made in found["units"].items():
            rows = [row for row in made["rows"] if row.get("left_out")]
            said = [f"{called(row)}: {row['left_out'][:160]}" for row in rows]
            said += [note[:200] for note in made.get("notes", []) if "left out" not in note]
            lines += [f"- {name}, {unit}: {line}" for line in dict.fromkeys(said)]
        if found["left_out"]:
            lines.append(f"- {name}, for want of time: {', '.join(found['left_out'])}")
    return "## What was left out, or became smaller\n\n" + "\n".join(lines) + "\n" if lines else ""


def called(row: dict) -> str:
    """What a row is of."""
    return next((f"`{row[key]}`" for key in ("method", "system", "kernel", "tool") if key in row), "a row")


def predicted() -> str:
    """The headline as the simulator has it for a machine of the sheet."""
    sheet = MACHINES[predict.SHEET]
    table = [
        [row["batch"], f"{row['link_gbps']:g}", f"`{row['system']}`", number(row["prefill_s"]),
         number(row["step_ms"]), number(row["total_s"])]
        for row in predict.unseen()
    ]  # fmt: skip
    heads = ["batch", "link, GB/s", "system", "prefill, s", "step, ms", "total, s"]
    speed = f"{sheet.flops / 1e12:.0f} Tflop/s, {sheet.memory / 1e9:,.0f} GB/s"
    words = (
        "*Predicted, not measured*: OPT-13B, prompts of 1,920 tokens and 128 more, on a machine of an "
        f"H100's sheet ({speed}), behind its own link and behind the paper's. `infinigen` fetches a tenth "
        "and two layers whole, `h2o` holds a fifth, unified memory has room for half of the tokens:"
    )
    return f"## Predicted\n\n{textwrap.fill(words, 110)}\n\n{markdown(heads, table)}"
