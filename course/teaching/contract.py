"""The contract: the one question of the course, its bill, and the reader's first guess.

Two hundred pages are about 120,000 tokens; the GPU is an RTX 4090 with 24 GB; the model has 8 billion
parameters. Every chapter adds its methods to one picture, of bounds from `kvlab.bill`: sizes and data sheets.
"""

from __future__ import annotations

import json

import matplotlib
from matplotlib.figure import Figure

import kvlab
from kvlab import scratch
from kvlab.bill.account import account, policies
from kvlab.bill.bill import Bill
from kvlab.bill.data import model_named
from kvlab.plots import GREY, INK, SETTINGS, canvas, style
from kvlab.spec import parse

MODEL, DEVICE = "meta-llama/Llama-3.1-8B", "RTX 4090"
PAGES, TOKENS_PER_PAGE = 200, 600
TOKENS = PAGES * TOKENS_PER_PAGE
ASKED = {  # what the reader guesses in chapter 0: key -> (the question, the unit)
    "memory": ("memory for model and cache", "GB"),
    "reading": ("time to read the contract", "seconds"),
    "token": ("time for one token of the answer, without a cache", "seconds"),
}


def bill(*methods: str) -> Bill:
    """The bill of the contract for these methods."""
    return kvlab.bill(MODEL, DEVICE, context=TOKENS, methods=methods)


def picture(*methods: str) -> tuple[Figure, str]:
    """The picture that every chapter adds to: what each method holds on the GPU, against its 24 GB.

    Returns the figure and the sentence that says what it shows.
    """
    asked = bill(*methods)
    weights, memory = asked.weights_bytes / 1e9, asked.memory / 1e9
    axes = canvas(8.6, 1.15 + min(0.36, 2.5 / len(methods)) * len(methods))[1][0]
    with matplotlib.rc_context(SETTINGS):
        for row, line in enumerate(asked.lines):
            cache = line.device_bytes / 1e9
            axes.barh(row, weights, color=GREY, height=0.62)
            axes.barh(row, cache, left=weights, color=style(line.method)[0], height=0.62)
            axes.text(33, row, _said(line), va="center")
        axes.axvline(memory, color=INK, ls="--", lw=1)
        top = {"xycoords": ("data", "axes fraction"), "annotation_clip": False, "va": "bottom"}
        axes.annotate(f"{DEVICE}: {memory:g} GB", (memory, 1.0), ha="center", **top)
        axes.annotate("a token takes at least", (33, 1.0), **top)
        axes.set_yticks(range(len(methods)), [line.method for line in asked.lines])
        axes.set_ylim(len(methods) - 0.5, -0.7)
        axes.set_xlim(0, 32.5)
        axes.set_xlabel(f"GB: weights (grey), {TOKENS:,} tokens (coloured)")
    fits = [line.method for line in asked.lines if line.users is None or line.users >= 1]
    too_large = [line.method for line in asked.lines if line.method not in fits]
    sentence = (
        f"The weights take {weights:.1f} of {memory:g} GB. "
        + (f"With {_list(too_large)} the contract does not fit; " if too_large else "")
        + (f"with {_list(fits)} it does." if fits else "nothing fits yet.")
    )
    return axes.figure, sentence


def _said(line) -> str:
    if line.users is not None and line.users < 1:
        return "does not fit"
    step = f"{line.step:.1f} s" if line.step >= 1 else f"{line.step * 1e3:.0f} ms"
    return f"{step} ({line.first})"


def _list(names) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def guess(**numbers: float) -> None:
    """Keep the reader's guesses (`memory` in GB, `reading` and `token` in seconds) until the last chapter.

    Nothing is kept while a number is missing or still dots. ValueError for a name that is not asked for.
    """
    unknown = set(numbers) - set(ASKED)
    if unknown:
        raise ValueError(f"{_list(sorted(unknown))}: the guesses are called {_list(list(ASKED))}")
    missing = [name for name in ASKED if not isinstance(numbers.get(name), int | float)]
    if missing:
        print(f"Not yet: write a number for {_list(missing)}. A wrong one is worth more here than none.")
        return
    _file().parent.mkdir(parents=True, exist_ok=True)
    _file().write_text(json.dumps(numbers), encoding="utf-8")
    print("Kept. The last chapter shows these numbers to you again.")


def answers() -> dict[str, float]:
    """What the bill says to the three questions of chapter 0."""
    asked = bill("full", "recompute")
    return {
        "memory": (asked.weights_bytes + asked["full"].device_bytes) / 1e9,
        "reading": asked.prefill,
        "token": asked["recompute"].step,
    }


def compare() -> None:
    """Print the bill's numbers, beside the reader's guesses where there are any."""
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    print(f"{'':52}{'your guess':>12}{'at least':>12}")
    for name, value in answers().items():
        what, unit = ASKED[name]
        mine = f"{kept[name]:g}" if isinstance(kept.get(name), int | float) else "–"
        print(f"{what + ', ' + unit:52}{mine:>12}{value:>12.1f}")


def _file():
    return scratch.folder("guess") / "contract.json"


def bytes_per_token(model: str) -> float:
    """Bytes of K and V per token at 16 bits, of a model that the bill knows, over the whole contract."""
    full = parse("full")
    return account(full, policies(full), model_named(model)[1], TOKENS).device / TOKENS
