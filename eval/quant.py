"""`python -m eval quant`: what bits buy, and what re-quantizing costs (documents 000 and 004).

    bits    questions answered and perplexity against true bits per value
    drift   perplexity and error after 1,500 decoded tokens, stored once or re-quantized at every step

Bits per value are measured: the bytes of the tensors that a cache holds, scales, zero points and windows
included, over the numbers it stands for. Writes `quant.json`, a list of rows {experiment, method, metric,
value, unit, tokens}, and `quant-bits` and `quant-drift` as SVG and PNG.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import kvlab
from kvlab import plots
from kvlab.decode import Stepper
from kvlab.store import Growing, Int

from .machine import Problem, machine
from .offload.figures import save
from .offload.quality import answered, perplexity, questions
from .plots import label_above
from .results import stored_rows, write_json
from .taskset import stories

EXPERIMENTS = ("bits", "drift")
FILE = "quant.json"
METHODS = (
    "full", "int8", "int8:group=8", "int4", "int4:group=8", "int4:axis=channel", "int4:symmetric=false",
    "int2", "int2:group=8,symmetric=false", "kivi2", "fp8:format=e5m2", "fp8:format=e4m3",
)  # fmt: skip
DOCUMENTS, STORY = 200, 280  # questions; tokens of a story, of which the first quarter is prompt
PROMPT, DECODED, TEXTS = 64, 1500, 2  # drift: tokens prefilled, tokens decoded, texts
MEASURED = 1024  # tokens at which bits per value are measured
LAST = 250  # drift: tokens that a point of the curve averages


@dataclass(frozen=True)
class Row:
    experiment: str
    method: str
    metric: str
    value: float
    unit: str
    tokens: int


class Requantized(Growing):
    """What document 000 warns of: at every step all that is held is decoded and quantized anew, with the
    scale of all that is held, so that a new largest value rounds everything again."""

    changes = 0  # steps at which the scale of K changed in the first row

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        before = self.format.fixed
        if self.keys is not None:
            held = self.read(keys.device)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(held, (keys, values), strict=True))
            self.keys = self.values = None
            self.format.fixed = self.value_format.fixed = ()
        super().append(keys, values)
        self.changes += bool(before) and not torch.equal(before[0][0], self.format.fixed[0][0])


def bits_per_value(model, method: str, tokens: int = MEASURED) -> float:
    """Bits held for every number of K and V after a prompt of `tokens` and one step."""
    cache = kvlab.make_cache(model, method)
    stepper = Stepper(model, cache)
    stepper.feed(
        torch.full((1, tokens - 1), 5, device=model.device) + torch.arange(tokens - 1).to(model.device) % 50
    )
    stepper.feed(torch.full((1, 1), 5, device=model.device))
    shape = kvlab.models.ModelShape.of(model)
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens
    return 8 * cache.stats().device_bytes / numbers


def bits(model, tokenizer, methods, limit: int | None) -> Iterator[Row]:
    """Questions answered (recall, per cent) and perplexity of held-out stories, with true bits per value."""
    prompts, answers = questions(tokenizer, limit or DOCUMENTS)
    length = round(statistics.mean(map(len, prompts)))
    text = [tokenizer(story).input_ids[:STORY] for story in stories()]
    text = torch.tensor([ids for ids in text if len(ids) == STORY][:limit], device=model.device)
    measured = min(MEASURED, kvlab.models.ModelShape.of(model).context or MEASURED)
    for method, (right, _) in answered(model, prompts, answers, list(methods)).items():
        yield Row("bits", method, "accuracy", 100 * right, "%", length)
    for method in methods:
        yield Row("bits", method, "bits per value", bits_per_value(model, method, measured), "bits", measured)
        yield Row("bits", method, "perplexity", perplexity(model, text, method), "", STORY)


def ways() -> dict[str, Growing | None]:
    """The stores that `drift` compares: a scale per token and head, or one for all of K and of V of a layer,
    fixed by the prompt or found anew at every step."""
    found: dict[str, Growing | None] = {"full": None}
    for width in (8, 4):
        found[f"int{width}, scale per token"] = Growing(Int(width))
        for name, store in (("stored once", Growing), ("re-quantized", Requantized)):
            found[f"int{width}, {name}"] = store(Int(width, axis="tensor"))
    return found


@torch.inference_mode()
def drift(model, tokenizer, methods, limit: int | None) -> Iterator[Row]:
    """Perplexity of stretches of a long text, and at the end the error of what is held."""
    decoded = min(limit or DECODED, (kvlab.models.ModelShape.of(model).context or DECODED + PROMPT) - PROMPT)
    ids = [token for story in stories() for token in tokenizer(story).input_ids]
    size = PROMPT + decoded
    ids = (ids * (1 + TEXTS * size // len(ids)))[: TEXTS * size]
    ids = torch.tensor(ids, device=model.device).view(TEXTS, size)
    exact = None
    for name, store in ways().items():
        cache = kvlab.KVCache(model, store=store)
        stepper = Stepper(model, cache)
        logits, losses = stepper.feed(ids[:, :PROMPT], last=True), []
        for column in range(PROMPT, size):
            losses.append(-logits.log_softmax(-1).gather(1, ids[:, column : column + 1]).mean().item())
            logits = stepper.feed(ids[:, column : column + 1], last=True)
        for end in range(min(LAST, decoded), decoded + 1, LAST):
            value = math.exp(statistics.mean(losses[max(0, end - LAST) : end]))
            yield Row("drift", name, "perplexity", value, "", end)
        held = cache.layers[0].store.read(ids.device)  # what the first layer stores depends on no other layer
        exact = held if exact is None else exact
        if isinstance(store, Requantized):
            changes = statistics.mean(layer.store.changes for layer in cache.layers)
            yield Row("drift", name, "changes of K's scale", changes, "per layer", size)
        for what, ours, true in zip(("K", "V"), held, exact, strict=True):
            error = 100 * ((ours - true).norm() / true.norm()).item()
            yield Row("drift", name, f"error of {what} in layer 0", error, "%", size)


def bits_figure(rows: list[dict]):
    """Accuracy, and below it perplexity, against true bits per value."""
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    found: dict[str, dict] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["metric"]] = row["value"]
    for panel, metric in zip(panels, ("accuracy", "perplexity"), strict=True):
        for method, one in found.items():
            colour, marker, _ = plots.style(method)
            panel.plot(one["bits per value"], one[metric], marker, color=colour, mec=plots.INK, mew=0.5, ms=7)
        panel.grid(True)
    upper, lower = panels
    upper.margins(y=0.2)
    upper.set(ylabel="questions answered, %", xscale="log", xlim=(1.9, 40))
    lower.set(ylabel="perplexity", xlabel="bits per value, scales and windows included", yscale="log")
    lower.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    lower.minorticks_off()
    values = [one["perplexity"] for one in found.values()]
    steps = [step for step in range(0, 2000, 10) if min(values) - 10 < step < max(values) + 10]
    lower.set_yticks(steps, map(str, steps))
    place = upper.transData + upper.transAxes.inverted()
    label_above(
        upper,
        [
            (*place.transform((one["bits per value"], one["accuracy"])), method)
            for method, one in sorted(found.items(), key=lambda item: item[1]["bits per value"])
        ],
    )
    return figure


def drift_figure(rows: list[dict]):
    """Perplexity along a long text, over that of the full cache on the same tokens."""
    figure, (panel,) = plots.canvas(6.4, 3.6)
    colours = {"int8": plots.GREEN, "int4": plots.VERMILLION}
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["metric"] == "perplexity":
            curves.setdefault(row["method"], {})[row["tokens"]] = row["value"]
    full = curves.pop("full")
    for name, curve in curves.items():
        line = "--" if "re-quantized" in name else ":" if "per token" in name else "-"
        excess = [100 * (value / full[tokens] - 1) for tokens, value in curve.items()]
        panel.plot(
            list(curve), excess, line, marker="o", ms=4, color=colours[name.partition(",")[0]], label=name
        )
    panel.axhline(0, color=plots.INK, lw=1)
    panel.set(xlabel="tokens decoded", ylabel=f"perplexity of {LAST} tokens,\n% above the full cache's")
    panel.grid(True)
    panel.legend(frameon=False, fontsize=8.5)
    return figure


def run(
    names, methods, model: str | None, out: Path, device=None, dtype=None, limit=None, line=print
) -> list[dict]:
    """Run experiments one after the other; rows of others that the file holds stay. Returns all rows."""
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise Problem(f"--experiments {unknown[0]}: expected one of {', '.join(EXPERIMENTS)}")
    out.mkdir(parents=True, exist_ok=True)
    loaded = kvlab.load(model, device=device, dtype=dtype)
    rows = stored_rows(out / FILE, EXPERIMENTS)
    for name in names:
        line(f"{name} ...")
        rows = [row for row in rows if row["experiment"] != name]
        for found in globals()[name](*loaded, methods, limit):
            row = asdict(found)
            rows = sorted([*rows, row], key=lambda row: row["experiment"])
            write_json(out / FILE, rows)
            what = f"{row['metric']} {row['value']:.4g} {row['unit']}".strip()
            line(f"  {row['method']}: {what} at {row['tokens']} tokens")
    write_json(out / "quant-machine.json", machine(str(loaded[0].device), torch.get_num_threads()))
    for name, draw in (("bits", bits_figure), ("drift", drift_figure)):
        mine = [row for row in rows if row["experiment"] == name]
        if mine:
            save(draw(mine), out / f"quant-{name}")
    return rows
