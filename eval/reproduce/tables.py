"""Tables: what stands between the marks of a document, written anew from the collected studies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from ..core.digests import ROOT
from ..core.files import write_file
from ..report import attention, contexts, steps
from ..report.perplexity import beyond, bits
from ..report.tables import HALF
from . import peers
from .collect import read

DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/results.md",
        "docs/protocols.md",
        "docs/quantization.md",
        "docs/toy_and_real.md",
        "docs/performance.md",
    )
)
MARKED = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
PROTOCOLS = ("context-first", "question-inside")
ASKED = ("many-questions", "reuse", "question-inside")  # one context, several questions
MISSING = "Not made yet: `make reproduce` makes it."


def fill(document) -> None:
    """Write a document's marked tables anew."""
    if document.is_file():
        write_file(document, filled(document.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """A document with its tables as the collected studies say: `<!-- results: NAME ARGUMENT ... -->`."""

    def table(match: re.Match) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}{TABLES[name](*arguments)}\n{match[3]}"

    return MARKED.sub(table, text)


def label(method: str) -> str:
    """A method as a table names it: its text without the budget, which stands above the table, and without
    the file that is the reader's own."""
    name, _, rest = method.partition(":")
    more = ",".join(part for part in rest.split(",") if part and not part.startswith(("budget=", "profile=")))
    return f"{name}:{more}" if more else name


def study(name: str) -> list[dict]:
    """A study's collected rows; none where it has not been collected."""
    file = ROOT / "docs" / "results" / f"{name}.json"
    return read(file) if file.is_file() else []


def markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracy(name: str, budget: str = "0.2", *tasks: str) -> str:
    """Methods by tasks under both protocols at one budget, as `percent` says them, and their bytes."""
    rows = [row for row in study(name) if row["budget"] in (None, float(budget))]
    if not rows:
        return MISSING
    at = {(row["protocol"], row["task"], label(row["method"])): row for row in rows}
    tasks = tasks or tuple(dict.fromkeys(row["task"] for row in rows))
    there = [(p, t) for p in PROTOCOLS for t in tasks if (p, t, "full") in at]
    methods = list(dict.fromkeys(label(row["method"]) for row in rows))
    protocols = list(dict.fromkeys(p for p, _ in there))
    named = " / ".join(protocols)
    head = ["method", *(f"{t}, {p}" for p, t in there), f"bytes held, {named}", f"moved per step, {named}"]
    body = []
    for method in methods:
        mine = [at.get((p, t, method)) for p, t in there]
        if any(mine):
            each = [sizes([row for row in mine if row and row["protocol"] == p]) for p in protocols]
            body.append([f"`{method}`", *map(percent, mine), *map(one_by_one, zip(*each, strict=True))])
    floors = [at[p, t, "full"]["floor"] for p, t in there]
    if any(floor is not None for floor in floors):
        named = ["–" if floor is None else f"{100 * floor:.1f}" for floor in floors]
        body.append(["`full`, 0 shots", *named, "", ""])
    guess = [f"{100 * at[p, t, 'full']['chance']:.1f}" for p, t in there]
    body.append(["guessing", *guess, "", ""])
    return "\n\n".join([markdown(head, body), stands_on(rows, there, at)])


def percent(row: dict | None) -> str:
    """A score ± its standard error; * where it differs from that of `full`; nothing is compared at chance.
    ! where a rule chose more slots than the method's score."""
    if row is None:
        return "–"
    mark = "*" if row["differs"] else ""
    return f"{100 * row['value']:.1f}{mark} ± {100 * (row['stderr'] or 0):.1f}" + " !" * by_rule(row)


def by_rule(row: dict | None) -> bool:
    """Whether a rule, such as a window, held most of what stayed of the prompt."""
    return row is not None and row["scored"] is not None and row["scored"] < HALF


def one_by_one(texts: tuple[str, ...]) -> str:
    """What protocols say, one beside the other, or once where they say the same."""
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def sizes(rows: list[dict]) -> list[str]:
    """Bytes held (device, and host where there is any) and moved, as shares of what `full` holds: of rows of
    one protocol, means over tasks."""
    if not rows:
        return ["–", "–"]
    mean = lambda name: sum(row[f"{name}_of_full"] for row in rows) / len(rows)
    held = f"{100 * mean('device_bytes'):.0f} %"
    host = mean("host_bytes")
    return [
        held + (f" + {100 * host:.0f} % on the host" if host else ""),
        f"{100 * mean('moved_bytes'):.0f} %",
    ]


def stands_on(rows: list[dict], there: list[tuple[str, str]], at: dict) -> str:
    """One paragraph: what these numbers are of."""
    one = rows[0]
    counts = dict.fromkeys((t, at[p, t, "full"]["n"]) for p, t in there)
    several = len(counts) > len({t for t, _ in counts})  # a task has other documents under another protocol
    counts = dict.fromkeys(f"{t} {at[p, t, 'full']['n']}" + (f" ({p})" if several else "") for p, t in there)
    shown = [row for (p, t, _), row in at.items() if (p, t) in there]
    every = lambda key: ", ".join(sorted({row[key] for row in rows}))
    model = [f"{one['model']} (digest {every('model_digest')})", one["dtype"], *shots(shown)]
    said = [f"{', '.join(model)}; documents: {', '.join(counts)}"]
    low = sorted({t for p, t in there if not at[p, t, "full"]["compared"]})
    if low:
        said.append(f"full does not beat guessing on {', '.join(low)}, so no method is compared there")
    marks = [f"* differs from `full` ({test(shown)})"]
    if any(map(by_rule, shown)):
        marks.append("! a rule held more slots than the method's score chose")
    said.append(
        "; ".join([*marks, f"{every('machine')}, torch {every('torch')}, code {every('code_digest')}"])
    )
    return ". ".join(said) + "."


def shots(rows: list[dict]) -> list[str]:
    """How many examples stood before an item, where every row knows it."""
    counts = {row.get("shots") for row in rows}
    return [] if None in counts else [" or ".join(map(str, sorted(counts))) + " shots"]


def test(rows: list[dict]) -> str:
    """What a star stands on: McNemar's test, but where a score is a share of what was asked for."""
    shares = dict.fromkeys(row["task"] for row in rows if row["p"] is None)
    besides = f"; {', '.join(shares)}: two standard errors of the paired difference" if shares else ""
    return f"McNemar, p < 0.05{besides}"


def curves(name: str, task: str, protocol: str) -> str:
    """One task under one protocol: methods by budgets, and where the method's own score chose most slots."""
    rows = [row for row in study(name) if row["task"] == task and row["protocol"] == protocol]
    if not rows:
        return MISSING
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    body = []
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = {row["budget"]: row for row in rows if row["curve"] == curve}
        if None in mine:
            continue
        body.append([f"`{curve}`", *(percent(mine.get(budget)) for budget in budgets)])
    full = next((row for row in rows if row["method"] == "full"), None)
    head = [f"`full`: {percent(full)}", *(f"{100 * budget:g} %" for budget in budgets)]
    return markdown(head, body)


def beside(budget: str, *tasks: str) -> str:
    """The workshop models beside SmolLM2 at one budget, the methods that all have by tasks and protocols."""
    named = {"workshop": study("toy"), "workshop-opt": study("opt"), "SmolLM2": study("passages")}
    at = {
        (model, row["protocol"], row["task"], label(row["method"])): row
        for model, rows in named.items()
        for row in rows
        if row["budget"] in (None, float(budget))
    }
    there = [(m, p, t) for t in tasks for p in PROTOCOLS for m in named if (m, p, t, "full") in at]
    if not there:
        return MISSING
    body = []
    for method in dict.fromkeys(key[3] for key in at):
        mine = [at.get((*column, method)) for column in there]
        if all(mine):
            body.append([f"`{method}`", *map(percent, mine)])
    guess = [f"{100 * at[*column, 'full']['chance']:.1f}" for column in there]
    head = ["method", *(f"{task}, {protocol}: {model}" for model, protocol, task in there)]
    return markdown(head, [*body, ["guessing", *guess]])


def perplexity(name: str = "perplexity") -> str:
    """Models by methods: perplexity, and what a token costs beyond `full` in the last quarter of a chunk."""
    rows = study(name)
    if not rows:
        return MISSING
    models = list(dict.fromkeys(row["model"] for row in rows))
    at = {(row["model"], label(row["method"])): row for row in rows}
    methods = list(dict.fromkeys(label(row["method"]) for row in rows))
    body = []
    for method in methods:
        line = [f"`{method}`"]
        for model in models:
            row, full = at.get((model, method)), at.get((model, "full"))
            if row is None:
                line += ["–", "–"]
                continue
            late = [end(one) for one in (row, full) if one]
            line += [f"{row['perplexity']:.4g}", f"{late[0] - late[-1]:+.3f} ± {beyond(row, full):.3f}"]
        body.append(line)
    head = [
        "method",
        *(cell for model in models for cell in (model, f"{model}: nats beyond full, last quarter")),
    ]
    one = rows[0]
    last = (
        f"{models_of(rows)}; {len(one['values'])} chunks of {one['chunk']} tokens, of which the last "
        f"{one['chunk'] - one['prompt']} are decoded; {one['machine']}, torch {one['torch']}, "
        f"code {one['code_digest']}."
    )
    return "\n\n".join([markdown(head, body), last])


def models_of(rows: list[dict]) -> str:
    """Each model of these rows with its digest and the form that its weights ran in."""
    told = {row["model"]: row for row in rows}
    return "; ".join(f"{name} (digest {row['model_digest']}), {form(row)}" for name, row in told.items())


def form(row: dict) -> str:
    """What a row's weights ran in: kvlab's own where it was not told."""
    return row.get("dtype") or "float32"


def end(row: dict) -> float:
    """Mean loss in the last quarter of the places."""
    last = row["rows"][-max(1, len(row["rows"]) // 4) :]
    return sum(place["loss"] for place in last) / len(last)


def formats(name: str = "formats") -> str:
    """Formats by the bits that they take: perplexity, and what a token costs beyond `full`."""
    rows = study(name)
    if not rows:
        return MISSING
    full = next(row for row in rows if row["method"] == "full")
    body = []
    for row in sorted(rows, key=lambda one: -bits(one, full)):
        lost = math.log(row["perplexity"] / full["perplexity"])
        told = "" if row is full else f"{lost:+.3f} ± {beyond(row, full):.3f}"
        body.append([f"`{row['method']}`", f"{bits(row, full):.3g}", f"{row['perplexity']:.4g}", told])
    last = (
        f"{row['model']} (digest {row['model_digest']}), {row['dtype']}; {row['limit']} chunks of "
        f"{row['chunk']} tokens, of which the last {row['chunk'] - row['prompt']} are decoded; "
        f"{row['machine']}, torch {row['torch']}, code {row['code_digest']}."
    )
    head = ["format", "bits a number", "perplexity", "nats beyond full"]
    return "\n\n".join([markdown(head, body), last])


def costs(name: str, protocol: str, model: str | None = None) -> str:
    """What a context costs that is asked several questions, under one protocol: methods by bytes held,
    contexts, tokens prefilled and seconds; dashes where a row was made before contexts were counted."""
    rows = [row for row in study(name) if row["protocol"] == protocol and model in (None, row["model"])]
    if not rows:
        return MISSING
    body = [
        [row["model"], f"`{label(row['method'])}`", sizes([row])[0], *contexts.texts([row])] for row in rows
    ]
    head = ["model", "method", "bytes held", *contexts.HEADS]
    one = rows[0]
    last = f"{models_of(rows)}, {one['task']}; {one['machine']}, torch {one['torch']}"
    last += f", code {one['code_digest']}."
    return "\n\n".join([markdown(head, body), last])


def reuse(name: str = "reuse") -> str:
    """Several questions on a context: methods by models and by what the compression knew, per cent right."""
    rows = study(name)
    if not rows:
        return MISSING
    at = {(row["model"], row["protocol"], label(row["method"])): row for row in rows}
    there = [(m, p) for m in dict.fromkeys(key[0] for key in at) for p in ASKED if (m, p, "full") in at]
    body = []
    for method in dict.fromkeys(key[2] for key in at):
        mine = [at.get((*column, method)) for column in there]
        body.append([f"`{method}`", *map(percent, mine)])
    guess = [f"{100 * at[*column, 'full']['chance']:.1f}" for column in there]
    head = ["method", *(f"{model}, {protocol}" for model, protocol in there)]
    told = {row["model"]: row for row in rows}.values()
    models = "; ".join(
        f"{one['model']} (digest {one['model_digest']}), {one['dtype']}, {one['n']} questions" for one in told
    )
    last = (
        f"{models}; {', '.join([*shots(rows), rows[0]['task']])}; * differs from `full` (McNemar, p < 0.05); "
        f"{rows[0]['machine']}, torch {rows[0]['torch']}, code {rows[0]['code_digest']}."
    )
    return "\n\n".join([markdown(head, [*body, ["guessing", *guess]]), last])


def lengths(name: str = "beyond", band: str = "1024") -> str:
    """Methods by bands of so many positions: perplexity within each, and the bytes held beside those of
    `full`, mean over steps."""
    rows, wide = study(name), int(band)
    if not rows:
        return MISSING
    starts = sorted({place["position"] // wide * wide for place in rows[0]["rows"]})
    full = next(row for row in rows if row["method"] == "full")
    body = []
    for row in rows:
        line = [f"`{row['method']}`"]
        for start in starts:
            mine = [place for place in row["rows"] if start <= place["position"] < start + wide]
            tokens = sum(place["tokens"] for place in mine)
            line.append(f"{math.exp(sum(place['loss'] * place['tokens'] for place in mine) / tokens):.4g}")
        share = row["bytes"]["device_bytes"] / full["bytes"]["device_bytes"]
        body.append([*line, f"{100 * share:.0f} %"])
    last = (
        f"{models_of([full])}; {len(full['values'])} chunks of "
        f"{full['chunk']} tokens, of which the first {full['prompt']} are prefilled; {full['machine']}, "
        f"torch {full['torch']}, code {full['code_digest']}."
    )
    head = ["method", *(f"{start:,} to {start + wide - 1:,}" for start in starts), "bytes held"]
    return "\n\n".join([markdown(head, body), last])


def pairs(model: str) -> str:
    """One model's methods beside those of kvpress."""
    rows = [row for row in study("peers") if row["model"] == model]
    if not rows:
        return "Not made yet: `make peers` makes it."
    head, body = peers.lines(rows)
    counts = ", ".join(
        f"{task}, {protocol} {row['n']} ({row['tokens']} tokens, {row['kept']:g} held)"
        for (task, protocol), row in {(row["task"], row["protocol"]): row for row in rows}.items()
    )
    one = rows[0]
    return "\n\n".join([
        markdown(head, body),
        f"{model} (digest {one['model_digest']}), float32, one thread; documents: "
        f"{counts}; {one['machine']}, torch {one['torch']}, code {one['code_digest']}.",
    ])  # fmt: skip


def speed(kind: str, *arguments: str) -> str:
    """Decode steps beside llama.cpp's and transformers': `times` and `bandwidths` MODEL THREADS, `ratios`
    THREADS; then the kind of rows, where it is not steps as they are; then what the processor can, where
    that is not the first of `steps.LEVELS`."""
    *said, last = arguments
    level, said = (last, said) if last in steps.LEVELS else (steps.LEVELS[0], arguments)
    head, body, rows = getattr(steps, kind)(steps.of_level(study("speed"), level), *said)
    if not rows:
        return "Not made yet: `make bench PEERS=1` makes it."
    return "\n\n".join([markdown(head, body), steps.stands_on(rows)])


def kernels(simd: str, tokens: str) -> str:
    """Attention alone over so many tokens, compiled for these instructions: shares of the bandwidth."""
    head, body, rows = attention.fractions(study("attention"), simd, int(tokens))
    if not rows:
        return "Not made yet: `python -m eval attention --collect` makes it."
    return "\n\n".join([markdown(head, body), attention.stands_on(rows)])


TABLES: dict[str, Callable[..., str]] = {
    "accuracy": accuracy,
    "beside": beside,
    "costs": costs,
    "curves": curves,
    "formats": formats,
    "kernels": kernels,
    "lengths": lengths,
    "peers": pairs,
    "perplexity": perplexity,
    "reuse": reuse,
    "speed": speed,
}
