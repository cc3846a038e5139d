"""The contract: the one question of the course, its bill, and the reader's first guess.

Two hundred pages are about 120,000 tokens; the GPU is an RTX 4090 with 24 GB; the model has 8 billion
parameters. Every chapter adds its methods to one picture, of bounds from `kvlab.bill`: sizes and data sheets.
What an hour of the GPU costs is a printed price, and it changes: spheron.network/blog/
nvidia-h100-vs-rtx-4090-ai-training-inference-2026, "from $0.55/hr", as of 25 May 2026.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from numbers import Real

import matplotlib
from matplotlib.figure import Figure

import kvlab
from kvlab import scratch
from kvlab.bill.account import account, policies
from kvlab.bill.bill import Bill
from kvlab.bill.data import model_named
from kvlab.plots import GREY, INK, SETTINGS, canvas, style
from kvlab.spec import Spec, parse

from . import smollm2

MODEL, DEVICE = "meta-llama/Llama-3.1-8B", "RTX 4090"
PAGES, TOKENS_PER_PAGE = 200, 600
TOKENS = PAGES * TOKENS_PER_PAGE
ANSWER = 50  # tokens of an answer
PRICE = 0.55  # dollars for an hour of the device
ASKED = {  # what the reader guesses in chapter 0: key -> (what it is, its unit, what it is guessed of)
    "reading": ("time to read the contract", "seconds", "full"),
    "token": ("time for one more token", "seconds", "recompute"),
    "money": (f"price of an answer of {ANSWER} tokens", "cents", "recompute"),
}
STUDY = "after"  # of SmolLM2: who finds the sentence that is asked for


@dataclass(frozen=True)
class Cost:
    """What the contract takes with one method, at least.

    memory: GB of model and cache. reading: seconds. token: seconds for each token of the answer after the
    first. money: cents for one question. again: cents for another one, where the cache has stayed. The last
    three are None where it does not fit.
    """

    memory: float
    reading: float
    token: float | None = None
    money: float | None = None
    again: float | None = None


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
    fits = [line.method for line in asked.lines if _fits(line)]
    too_large = [line.method for line in asked.lines if line.method not in fits]
    sentence = (
        f"The weights take {weights:.1f} of {memory:g} GB. "
        + (f"With {_list(too_large)} the contract does not fit; " if too_large else "")
        + (f"with {_list(fits)} it does." if fits else "nothing fits yet.")
    )
    return axes.figure, sentence


def fitting(*methods: str) -> int:
    """How many of these caches fit beside the weights."""
    return sum(map(_fits, bill(*methods).lines))


def _fits(line) -> bool:
    return line.users is None or line.users >= 1


def _said(line) -> str:
    if not _fits(line):
        return "does not fit"
    step = f"{line.step:.1f} s" if line.step >= 1 else f"{line.step * 1e3:.0f} ms"
    return f"{step} ({line.first})"


def _list(names) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def cost(method: str) -> Cost:
    """What the contract takes with a method. The reading gives the first token of the answer; a method that
    reads the prompt again (KVzip) is charged two readings."""
    asked = kvlab.bill(MODEL, DEVICE, context=TOKENS, methods=method, price=PRICE)
    line, keep = asked.lines[0], policies(parse(method)).get("keep")
    readings = 2 if keep is not None and keep.rereads else 1
    memory = (asked.weights_bytes + line.device_bytes) / 1e9
    if line.step is None:
        return Cost(memory, readings * asked.prefill)
    read, token = readings * TOKENS * asked.prefill_cost / 1e6, line.cost / 1e6  # dollars
    money, again = 100 * (read + (ANSWER - 1) * token), 100 * ANSWER * token
    return Cost(memory, readings * asked.prefill, line.step, money, again)


def money(*methods: str) -> None:
    """Print what questions about the contract take with each method, in seconds and cents."""
    print(f"{'at least':20}{'reading':>11}{'answering':>14}{'one question':>16}{'another one':>16}")
    for method in methods:
        one = cost(method)
        said = [f"{one.reading:.0f} s", "does not fit"]
        if one.token is not None:
            said[1:] = f"{(ANSWER - 1) * one.token:.1f} s", f"{one.money:.2f} cents", f"{one.again:.2f} cents"
        wide = (11, 14, 16, 16)
        print(f"{method:20}" + "".join(f"{text:>{width}}" for text, width in zip(said, wide)))
    print(f"({ANSWER} tokens an answer; {DEVICE} at {PRICE} dollars an hour, a price of 25 May 2026)")


def guess(**numbers: float) -> None:
    """Keep the reader's guesses (see ASKED) until the last chapter.

    Nothing is kept, and one line says what is expected, while a number is missing, still dots, or none that
    can be meant. ValueError for a name that is not asked for.
    """
    unknown = set(numbers) - set(ASKED)
    if unknown:
        raise ValueError(f"{_list(sorted(unknown))}: the guesses are called {_list(list(ASKED))}")
    missing = [name for name in ASKED if numbers.get(name, ...) is ...]
    if missing:
        print(f"Not yet: write a number for {_list(missing)}. A wrong one is worth more here than none.")
        return
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if not _amount(value)]
    if wrong:
        units = ", ".join(f"{name} in {ASKED[name][1]}" for name in ASKED)
        print(f"Not kept: {_list(wrong)}. Write plain numbers of zero or more, {units}.")
        return
    _file().parent.mkdir(parents=True, exist_ok=True)
    kept = {name: float(value) for name, value in numbers.items()}
    _file().write_text(json.dumps(kept), encoding="utf-8")
    print("Kept. The last chapter shows these numbers to you again.")


def _amount(value) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def compare(decided: str) -> None:
    """Print what was guessed beside three caches: none, all of it, and the method that was decided for; with
    the right answers that were stored of SmolLM2. Dots get one line. ValueError for an unknown method.
    """
    if decided is ...:
        print('Not yet: write the method that you decide for, such as decided = "int8".')
        return
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    columns = {"recompute": "keep nothing", "full": "keep all", decided: decided}
    costs, wide = {method: cost(method) for method in columns}, max(14, len(decided) + 2)
    print(f"{'':46}{'your guess':>12}" + "".join(f"{name:>{wide}}" for name in columns.values()))
    for name, (what, unit, of) in ASKED.items():
        mine = f"{kept[name]:g}" if _amount(kept.get(name)) else "–"
        values = [_number(getattr(one, name)) + "*" * (method == of) for method, one in costs.items()]
        print(f"{what + ', ' + unit:46}{mine:>12}" + "".join(f"{value:>{wide}}" for value in values))
    study = smollm2.stored()["studies"][STUDY]
    for protocol in (1, 2):
        values = [found(method, protocol) for method in columns]
        told = f"right answers**, {study['columns'][protocol]}"
        print(f"{told:58}" + "".join(f"{value:>{wide}}" for value in values))
    print(f"* what you were asked for   ** {smollm2.stored()['model']}, {study['caption']};")
    print("  without a cache it says what it says with all of it")


def _number(value: float | None) -> str:
    if value is None:
        return "does not fit"
    return f"{value:.3f}" if value < 0.1 else f"{value:.1f}"


def found(method: str, protocol: int) -> str:
    """How many right answers SmolLM2 gave with a method (1: question known, 2: unknown), or a dash where it
    was not asked. Without a cache it says what it says with all of it."""
    wanted = _meant(parse("full" if method == "recompute" else method))
    for row in smollm2.rows(STUDY):
        if _meant(parse(row[0])) == wanted:
            return str(row[protocol])
    return "–"


def _meant(spec: Spec) -> tuple:
    """A method and all its parameters, those that a spec leaves out too."""
    return spec.name, {**spec.method.parameters, **spec.parameters}


def _file():
    return scratch.folder("guess") / "contract.json"


def bytes_per_token(model: str) -> float:
    """Bytes of K and V per token at 16 bits, of a model that the bill knows, over the whole contract."""
    full = parse("full")
    return account(full, policies(full), model_named(model)[1], TOKENS).device / TOKENS
