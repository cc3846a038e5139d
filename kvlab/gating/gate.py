"""Gate: a verdict for every method on one model, from the model's own outputs under it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch

from ..devices import entry_of
from ..errors import first_line
from ..keep import KeepAll
from ..measure.host import cpu_model
from ..models import EMBEDDED, prepare
from ..parameters import check_kind, check_number, check_text, check_tokenizer
from ..spec import parse
from . import show
from .formats import Cost, cost, decoded
from .guess import foreseen
from .keeps import PROTOCOLS, Answers, ask, beats_guessing, difference
from .keys import LayerKeys, keys_of, noise
from .reading import Reading
from .room import Room, asked
from .rules import DECODED, PIECES, PROMPT, by_answers, verdict_of
from .texts import rows

FORMATS = (
    "int8", "kivi4", "mixed", "int4", "int4:rotate=true", "nvfp4", "turboquant", "fp8", "int8:group=32",
    "int8:rotate=true,group=32", "int4:group=32", "int4:rotate=true,group=32", "int4:axis=channel", "kivi2",
    "mxfp4", "int5", "int8:axis=channel", "kvquant",
)  # fmt: skip
KEEPS = ("h2o:budget=0.5", "snapkv:budget=0.5", "kvzip:budget=0.5", "sinks:budget=0.5")
OF_KEEPS = 0.4  # of the time, which is left for questions
INTERRUPTED = "interrupted: the methods below are those that were done"
ORDER = ("breaks", "costs", "undecided", "safe")  # the worst first
DOCUMENTS, FEW = 32, 8  # pairs of documents, at most, and where the full cache does not beat guessing


@dataclass(frozen=True)
class Line:
    """One method. verdict: safe, costs, breaks, undecided or no verdict; why: a reason in one line; bytes: of
    all users' caches with 16-bit numbers (None: it is refused); fits: whether they fit (None: no memory was
    given); cost: of a method that reads every token, or of the store alone of one that does not; noise: known
    before it is decoded, see `keys.noise`, of the layer where it is largest; accuracy: of a method that
    chooses, {protocol: share right}."""

    method: str
    verdict: str
    why: str
    bytes: float | None = None
    fits: bool | None = None
    cost: Cost | None = None
    noise: float | None = None
    accuracy: dict[str, float] | None = None


@dataclass(repr=False)
class Gate:
    """See `gate`. Prints as a table, in a notebook too; `dataclasses.asdict` is plain JSON.

    tokens: decoded for every format; questions: {protocol: how many}; full: the full cache's answers;
    full_bytes: its bytes for `users` contexts of `context` tokens, and whether they fit; memory: bytes
    available. made: when, where and with which versions.
    """

    model: str
    layers: list[LayerKeys]
    context: int
    users: int
    full_bytes: float
    memory: float | None
    tokens: int = 0
    questions: dict[str, int] = field(default_factory=dict)
    full: dict[str, float] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    stopped: str = ""
    full_fits: bool | None = None
    made: dict[str, str] = field(default_factory=lambda: made())

    def __getitem__(self, method: str) -> Line:
        return {line.method: line for line in self.lines}[method]

    def __str__(self) -> str:
        return show.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return show.html(self)

    @property
    def safe(self) -> list[Line]:
        """The methods that are safe and fit, the fewest bytes first."""
        found = [line for line in self.lines if line.verdict == "safe" and line.fits is not False]
        return sorted(found, key=lambda line: line.bytes or 0.0)


def made() -> dict[str, str]:
    """When, where, and with which versions numbers are made."""
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    day = time.strftime("%Y-%m-%d")
    return {"date": day, "cpu": cpu_model(), "threads": str(torch.get_num_threads())} | found


def gate(
    model, tokenizer, methods=None, *, text: str | None = None, minutes: float = 10.0, memory=None,
    context=None, users: int = 1, say: Callable[[str], None] = lambda line: None,
) -> Gate:  # fmt: skip
    """Which caches are safe on this model.

    methods: specs (default: `FORMATS` and `KEEPS`). A method that reads every token is judged by nats: three
    kinds of text are read, 88 tokens of each of six rows are fed through the cache, and the next token's
    probabilities compared with those of the full cache. *safe*: the whole 95 % interval is below `SAFE` nats;
    *breaks*: above `BREAKS`; *costs*: between them; *undecided*: it reaches across a limit, or the next token
    is another one too often (`SAME`) on a model to which all are about equally likely. A method that
    chooses tokens is judged by questions (`keeps.py`): *breaks* if it surely loses more than `POINTS` under a
    protocol, *costs* if it surely loses, *safe* if it surely loses less, under both. No verdict if the full
    cache does not beat guessing. The store of a method that chooses and rounds is judged by nats as well, and
    the worse verdict counts.

    text: your own, instead of the three kinds. minutes: after this time no method and no question begins.
    memory, context, users: what has to fit (see `Room.of`). say: a function that is called with the progress.
    Ctrl-C ends it with the results so far. ValueError, one line, for unknown methods, a text that is too
    short, and an invalid time or size.
    """
    specs = check(methods, minutes, memory, context, users)
    check_kind("say", say, Callable, "a function")
    model = prepare(model)
    check_tokenizer(tokenizer)
    if text is not None:
        check_text("text", text)
    room = Room.of(model.config, memory, context, users)
    ends = time.monotonic() + 60 * minutes
    ids = rows(tokenizer, PROMPT + DECODED, PIECES, text).to(entry_of(model))
    say(f"reading {len(ids)} texts")
    reading = Reading.of(model, ids[:, :PROMPT])
    path = Path(getattr(model, "name_or_path", "") or type(model).__name__)
    name = next((one for one, folder in EMBEDDED.items() if folder == path), path.name)
    full = room.bytes(parse("full"))
    found = Gate(name, keys_of(reading), room.context, users, full, room.memory, full_fits=room.fits(full))
    sizes = {spec.text: _size(spec, room) for spec in specs}  # before anything that Ctrl-C may end
    whole = {spec.text: spec for spec in specs if not chooses(spec)}
    keeps = [spec for spec in specs if chooses(spec)]
    stores = {spec.text: store for spec in keeps if (store := rounding(spec)) is not None}
    left = 60 * minutes * OF_KEEPS if keeps else 0.0
    try:
        judged = {}
        for line in _formats(found, reading, ids[:, PROMPT:], whole | stores, ends - left, say):
            if line.method in stores:
                judged[line.method] = line
            else:
                found.lines.append(line)
        if keeps:
            _keeps(found, model, tokenizer, keeps, judged, ends, say)
    except KeyboardInterrupt:
        found.stopped = INTERRUPTED
    found.lines = [replace(line, **sizes[line.method]) for line in found.lines]
    return found


def _size(spec, room: Room) -> dict:
    """A line's bytes; a method that the bill refuses on these layers has none."""
    try:
        size = room.bytes(spec)
    except ValueError:
        return {}
    return {"bytes": size, "fits": room.fits(size)}


def chooses(spec) -> bool:
    """Whether a method lets go of tokens, or fetches some alone."""
    return (spec.policies().get("keep") or KeepAll()).evicts or "budget" in spec.method.parameters


def rounding(spec):
    """The store of a method, if it rounds."""
    store = spec.policies().get("store")
    return None if getattr(store, "as_they_are", True) else store


def check(methods, minutes: float, memory, context, users: int) -> list:
    """The specs of `gate`'s methods; ValueError for arguments that no model allows: `kvlab gate` looks before
    it loads one."""
    check_number("minutes", minutes, lambda x: 0 < x < float("inf"), "a number above 0")
    asked(memory, context, users)
    if methods is None:
        methods = (*FORMATS, *KEEPS)
    elif isinstance(methods, str):
        methods = [methods]
    check_kind("methods", methods, list | tuple, "a list of methods")
    specs = [*{(spec := parse(one)).text: spec for one in methods}.values()]  # one named twice is asked once
    for spec in specs:
        try:
            chooses(spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"method {spec.text!r}: {error}") from None
    return specs


def _formats(found: Gate, reading: Reading, rest, asked: dict, ends: float, say) -> Iterator[Line]:
    """asked: {method: what `make_cache` takes}. First what foretells their verdicts, then each is decoded."""
    lines: dict[str, Line] = {}
    for method, given in asked.items():
        say(f"{method}: how far it moves the scores")
        try:
            moved = noise(reading, reading.taken(given).cache)
            lines[method] = Line(method, "no verdict", show.OVER, noise=max(moved, default=None))
        except (ValueError, TypeError) as error:
            lines[method] = Line(method, "no verdict", first_line(error))
    right = decoded(reading, rest, say) if asked else []
    found.tokens = rest.numel() if asked else 0
    for done, (method, line) in enumerate(lines.items()):
        if line.why != show.OVER or time.monotonic() > ends:
            yield line
            continue
        say(f"{method} ({done + 1} of {len(asked)} formats)")
        try:
            spent = cost(reading, asked[method], rest, right)
        except (ValueError, TypeError) as error:
            yield replace(line, why=first_line(error))
            continue
        why = f"{spent.nats:.2g} nats ({spent.low:.2g} to {spent.high:.2g})"
        yield replace(line, verdict=verdict_of(spent), why=why, cost=spent)


def _keeps(found: Gate, model, tokenizer, specs: list, judged: dict, ends: float, say) -> None:
    """judged: {method that also rounds: the line of its store alone}."""
    answers: dict[str, Answers] = {}
    refused: dict[str, str] = {}
    names = ["full", *(spec.text for spec in specs)]
    guesses = {spec.text: foreseen(model, tokenizer, spec) for spec in specs}
    try:
        for seed in range(DOCUMENTS):
            full = answers.get("full")
            lost = seed == FEW and not any(map(beats_guessing, full.right.values()))
            if lost or time.monotonic() > ends:
                break
            say(f"questions on {2 * seed + 2} of at most {2 * DOCUMENTS} documents")
            left = [name for name in names if name not in refused]
            try:
                refused |= ask(model, tokenizer, left, seed, answers)
                if "full" in refused:  # several tokens after a context, which its states forget
                    refused |= dict.fromkeys(left, refused["full"])
                    break
            except ValueError as error:  # of a document: it is longer than the model's context
                refused |= dict.fromkeys(left, str(error))
                break
    finally:
        full = answers.get("full", Answers())
        found.questions = {name: len(full.right[name]) for name in PROTOCOLS}
        found.full = {name: full.share(name) for name in PROTOCOLS if full.right[name]}
        for spec in specs:
            if spec.text in refused:
                found.lines.append(Line(spec.text, "no verdict", first_line(refused[spec.text])))
            elif spec.text in answers:
                line = _line(spec, answers[spec.text], full, guesses[spec.text])
                store = judged.get(spec.text)
                found.lines.append(line if store is None else _worse(line, store))
            elif time.monotonic() > ends:
                found.lines.append(Line(spec.text, "no verdict", show.OVER))


def _worse(line: Line, store: Line) -> Line:
    """The verdict of a method that chooses and rounds: what its store alone loses counts, too."""
    both = line.verdict, store.verdict
    verdict = next(one for one in (*ORDER, "no verdict") if one in both)
    if verdict in ("safe", "undecided") and "no verdict" in both:  # one of them says nothing
        verdict = "no verdict"
    return replace(line, verdict=verdict, why=f"{line.why}; its store alone: {store.why}", cost=store.cost)


def _line(spec, mine: Answers, full: Answers, guess: str) -> Line:
    verdicts, told = [], [guess] if guess else []
    for name in PROTOCOLS:
        count = len(mine.right[name])
        ours, theirs = mine.right[name], full.right[name][:count]
        if not beats_guessing(theirs):
            told.append(f"{name}: the full cache does not beat guessing")
            continue
        low, high = difference(ours, theirs)
        verdicts.append(by_answers(low, high))
        told.append(f"{name}: {100 * mine.share(name):.0f} % right, full {100 * full.share(name):.0f} %")
    verdict = next((one for one in ORDER if one in verdicts), "no verdict")
    if len(verdicts) < len(PROTOCOLS) and verdict == "safe":
        verdict = "undecided"
    accuracy = {name: mine.share(name) for name in PROTOCOLS}
    return Line(spec.text, verdict, "; ".join(told), accuracy=accuracy)
