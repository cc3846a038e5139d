"""The stored cells arranged in tables: a `Board` for each model, protocol and other setting.

Boards that differ in their protocol alone share a table (`together`), side by side. Differences are paired,
document by document on the same task (`statistics.py`). Where `full` itself does not beat guessing, no method
is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from types import SimpleNamespace

from kvlab.bill.show import size
from kvlab.finding import METHODS, PROFILED
from kvlab.spec import name_of

from ..accuracy.protocols import PROTOCOLS
from ..accuracy.taskset import AGREEMENT, LOCAL
from ..core.comparable import MACHINE, PLACES, SIDES, SPEED, WORDS, word
from ..core.errors import Problem
from ..core.numbers import is_share, shown, spread
from ..speed.baselines import BASELINES
from ..speed.speed import BUSY
from . import contexts, records


@dataclass
class Board:
    """Everything known about one model under one protocol."""

    model: str
    setting: str = ""  # what else it was made under, where the folder holds several
    methods: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)  # of `records.row`, agreement among them
    metric: dict[str, dict] = field(default_factory=dict)  # task -> its first row
    entries: dict[tuple[str, str], SimpleNamespace] = field(default_factory=dict)  # (method, task) -> its row
    agreement: dict[str, dict[str, dict]] = field(default_factory=dict)  # method -> metric -> row
    at_chance: list[str] = field(default_factory=list)  # tasks on which full does not beat guessing
    scored_share: dict[str, float] = field(default_factory=dict)  # method -> slots that its score chose
    bytes: dict[str, dict[str, float]] = field(default_factory=dict)  # method -> shares of full's
    mean: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # method -> accuracy
    speed: list[dict] = field(default_factory=list)
    cells: list[dict] = field(default_factory=list)
    against: str = "full"  # the method that others are compared with
    left_out: str = ""  # a line about cells of this model that are not comparable with these

    @property
    def scored(self) -> set[str]:
        """Methods with an accuracy number."""
        return {method for method, _ in self.entries}

    @property
    def timed(self) -> set[str]:
        """Methods with a speed row."""
        return {row["method"] for row in self.speed}

    @property
    def points(self) -> list[dict]:
        """Methods with a mean accuracy and bytes, which are shares of full's, as `plots.against_bytes` draws
        them: those on the device, and in all."""
        return [
            {"method": method, "accuracy": value, "stderr": error, "x": held["device_bytes"],
             "total": held["device_bytes"] + held["host_bytes"]}
            for method, (value, error) in self.mean.items()
            if (held := self.bytes.get(method))
        ]  # fmt: skip

    @property
    def asked_again(self) -> dict[str, list[str]]:
        """{method: its `contexts.HEADS`}, where a context is asked several questions."""
        scored = [row for row in self.rows if row["task"] != AGREEMENT]
        if not any(row["protocol"] in contexts.ASKED_AGAIN for row in scored):
            return {}
        return {m: contexts.texts(row for row in scored if row["method"] == m) for m in self.methods}

    @property
    def guesses(self) -> bool:
        return any(self.chance(task) is not None for task in self.tasks)

    @property
    def fp16_factor(self) -> float:
        """Bytes of a value in this run's dtype over those in fp16."""
        return next((c["value_bytes"] / 2 for c in self.cells if "value_bytes" in c), 1.0)

    @property
    def contexts(self) -> list[int]:
        return sorted({row["context"] for row in self.speed})

    def timing(self, method: str, context: int) -> dict | None:
        """The speed row of a method at a context."""
        found = (r for r in self.speed if r["method"] == method and r["context"] == context)
        return next(found, None)

    @property
    def busy(self) -> str:
        """A line about timings that others' work on the machine made too long; "" where there are none."""
        waited = [row["waited"] for row in self.speed if row.get("waited", 0) > BUSY]
        if not waited:
            return ""
        return (
            f"The machine was busy: {len(waited)} of {len(self.speed)} timings waited for a core, up to "
            f"{100 * max(waited):.0f} % of their time. They are too long: time again on a quiet machine, in "
            "another --out."
        )

    @property
    def protocol(self) -> str:
        """What of a prompt was compressed, and what keeps did after it; nothing where nothing was scored."""
        configs = (cell["config"] for cell in self.cells if not cell["task"].startswith(SPEED))
        config = next(configs, {})
        named = f"protocol {config['protocol']}" if "protocol" in config else ""
        return f"{named}, eviction {config['evict']}" if named and config.get("evict") else named

    def chance(self, task: str) -> float | None:
        """Accuracy of guessing, for multiple-choice tasks."""
        if not is_share(self.metric[task]):
            return None
        found = (c["chance"] for c in self.cells if c["task"] == task and c.get("chance") is not None)
        return next(found, None)

    @property
    def floors(self) -> dict[str, dict]:
        """{task: the metric of `full` without shots}, where the shots were the context."""
        return {c["task"]: c["floor"] for c in self.cells if c.get("floor")}

    @property
    def remarks(self) -> list[str]:
        """What has to be said beside the accuracies."""
        said = []
        for task in self.at_chance:
            full = self.entries["full", task]
            said.append(
                f"{task}: full answers {100 * full.value:.1f} ± {100 * (full.stderr or 0):.1f} %, which does "
                f"not beat guessing ({100 * full.chance:.1f} %) by two standard errors; no method is "
                "compared there"
            )
        for task, row in self.floors.items():
            said.append(
                f"{task}: full without any shots, the floor, answers {shown(row)} ± "
                f"{100 * (row['stderr'] or 0):.1f} %"
            )
        for task in self.tasks:
            for counted, what in LOST.items():
                if count := max(c.get(counted) or 0 for c in self.cells if c["task"] == task):
                    said.append(f"{task}: {what}: {count}")
        low = [m for m in self.methods if self.scored_share.get(m, 1) < HALF]
        if low:
            told = ", ".join(f"{m} ({100 * self.scored_share[m]:.0f} %)" for m in low)
            said.append(f"chosen by a rule more than by the method's own score: {told}")
        if other := {
            f"{c['method']} on {c['task']}": c["config"]["code"] for c in self.cells if c.get("other_code")
        }:
            told = ", ".join(f"{name} ({code})" for name, code in other.items())
            said.append(f"{OTHER_CODE} made by other code, and not to be compared with the rest: {told}")
        return said


OTHER_CODE = "†"
LOST = {  # what a cell counts that its score has lost
    "shortened": "prompts longer than the model takes, which lost their beginning",
    "spanned": "answers without a token apart from the context's, which have no score",
}
HALF = 0.5  # share of the slots that a method's score chose, below which its row is marked


def order(names, known) -> list[str]:
    """Known names first and in their order, then the others as they come."""
    names = list(dict.fromkeys(names))
    place = {name: i for i, name in enumerate(known)}
    return sorted(names, key=lambda name: place.get(name_of(name), len(place)))


def named(against: str, cells: list[dict]) -> str:
    """The method of these cells that `--against` means: by its text, or by its name where it is the only one.
    Raises Problem for none, or several."""
    methods = dict.fromkeys(cell["method"] for cell in cells if not cell["task"].startswith(SPEED))
    found = [m for m in methods if m == against] or [m for m in methods if name_of(m) == against]
    if len(found) == 1:
        return found[0]
    raise Problem(f"--against {against}: expected one of {', '.join(found or methods)}")


def united(several: Iterable[list[str]]) -> list[str]:
    """The names of several lists, each once, in the order of a table."""
    return order((name for names in several for name in names), [*METHODS, *PROFILED, *BASELINES])


def tabled(cells: Iterable[dict]) -> list[dict]:
    """The cells that the tables are made of: not those of studies."""
    return [cell for cell in cells if "metrics" in cell or cell["task"].startswith(SPEED)]


def boards(cells: list[dict], left_out: dict[str, str] | None = None, against: str = "full") -> list[Board]:
    """One board per model, setting and protocol, the first setting first, of cells that may be in tables
    (`core.comparable`). left_out: {model: a line about its other cells}. against: the method that others are
    compared with."""
    found: dict[tuple, Board] = {}
    keys: dict[str, dict] = {}  # model -> settings in which its tables differ
    for cell in cells:
        keys.setdefault(cell["model"], {}).update(cell.get("apart", {}))
    for cell in sorted(tabled(cells), key=_place):
        config, model = cell["config"], cell["model"]
        setting = ", ".join(f"{WORDS.get(key, key)} {word(config.get(key))}" for key in keys[model])
        place = (model, setting, *map(config.get, SIDES))
        if cell["task"].startswith(SPEED):
            place = next((key for key in found if key[0] == model and _as_fast(cell, found[key])), place)
        found.setdefault(place, Board(model, setting, against=against)).cells.append(cell)
    told = dict(left_out or {})
    for board in found.values():
        board.left_out = told.pop(board.model, "")  # once
        board.methods = united([[c["method"] for c in board.cells]])
        scored = [c for c in board.cells if not c["task"].startswith(SPEED) and c["metrics"]]
        board.tasks = order((c["task"] for c in scored if c["task"] != AGREEMENT), LOCAL)
        for cell in board.cells:
            if cell["task"].startswith(SPEED):
                board.speed += [{"method": cell["method"], **row} for row in cell["rows"]]
        board.speed.sort(key=lambda row: (board.methods.index(row["method"]), row["context"]))
        for cell in scored:
            if cell["task"] == AGREEMENT:
                board.agreement[cell["method"]] = {row["metric"]: row for row in cell["metrics"]}
        full, base = (
            {cell["task"]: cell for cell in scored if cell["method"] == name} for name in ("full", against)
        )
        scored.sort(key=lambda c: (c["task"], board.methods.index(c["method"])))
        board.rows = [records.row(cell, full.get(cell["task"]), base.get(cell["task"])) for cell in scored]
        other = {(cell["method"], cell["task"]) for cell in scored if cell.get("other_code")}
        for task in board.tasks:
            _fill(board, task, [row for row in board.rows if row["task"] == task], other)
        _means(board)
    return sorted(found.values(), key=lambda board: not board.tasks)


def _place(cell: dict) -> tuple:
    """Accuracy comes before speed, the first setting before others, protocols in their order."""
    protocols, speed = list(PROTOCOLS), cell["task"].startswith(SPEED)
    named = cell["config"].get("protocol")
    return speed, bool(cell.get("apart")), protocols.index(named) if named in protocols else -1


def _as_fast(cell: dict, board: Board) -> bool:
    """Whether a cell of speed, of the first machine, and a board are of one device and dtype."""
    mine, theirs = cell["config"], board.cells[0]["config"]
    return MACHINE not in cell.get("apart", {}) and all(mine.get(key) == theirs.get(key) for key in PLACES)


def together(found: list[Board]) -> list[list[Board]]:
    """Boards that share a table: they differ in their protocol alone."""
    groups: dict[tuple, list[Board]] = {}
    for board in found:
        groups.setdefault((board.model, board.setting), []).append(board)
    return list(groups.values())


def sides(group: list[Board]) -> list[str]:
    """What tells boards of one table apart: nothing where there is one, else their protocols."""
    if len(group) == 1:
        return [""]
    names = [board.cells[0]["config"].get("protocol") or "" for board in group]
    return names if len(set(names)) == len(names) else [board.protocol for board in group]


def _fill(board: Board, task: str, rows: list[dict], other: set) -> None:
    """The entries of a task; the best and the worst are marked unless none is compared, or all are alike."""
    board.metric[task] = rows[0]
    texts = {shown(row): row["value"] for row in rows}
    pick = (max, min) if rows[0]["higher_is_better"] else (min, max)
    best, worst = (choose(texts, key=texts.get) for choose in pick)
    marked = len(texts) > 1 and rows[0]["compared"] is not False
    if rows[0]["compared"] is False:
        board.at_chance.append(task)
    for row in rows:
        text, place = shown(row), (row["method"], task)
        marks = {"best": marked and text == best, "worst": marked and text == worst}
        marks |= {"text": text + OTHER_CODE * (place in other), "spread": spread(row)}
        board.entries[place] = SimpleNamespace(**row, **marks)


def _means(board: Board) -> None:
    """Every method's accuracy over the tasks on which methods are compared, its bytes as shares of what
    `full` holds, and the share of the slots that its score chose, on the task where that is least."""
    shares = [task for task in board.tasks if is_share(board.metric[task]) and task not in board.at_chance]
    for method in board.methods:
        entries = [board.entries[method, task] for task in shares if (method, task) in board.entries]
        if shares and len(entries) == len(shares):
            spread = math.hypot(*(one.stderr or 0.0 for one in entries)) / len(entries)
            board.mean[method] = mean(one.value for one in entries), spread
        mine = [row for row in board.rows if row["method"] == method]
        beside = [row for row in mine if row["device_bytes_of_full"] is not None]
        if beside:
            board.bytes[method] = {name: mean(r[f"{name}_of_full"] for r in beside) for name in records.NAMES}
        if told := [row["scored"] for row in mine if row["scored"] is not None]:
            board.scored_share[method] = min(told)


def units(group: list[Board]) -> str:
    """The units of the scores of boards that share a table."""
    metrics = [board.metric[task] for board in group for task in board.tasks]
    said = ["per cent right"] if any(map(is_share, metrics)) else []
    said += ["perplexity (lower is better)"] if not all(m["higher_is_better"] for m in metrics) else []
    return " or ".join(said) or "scores"


def headline(board: Board) -> str:
    """The main result in one or two sentences, computed from the numbers; "" where no shares are compared."""
    parts = []
    lossy = {m: a for m, (a, _) in board.mean.items() if m in board.bytes and m != "full"}
    if "full" in board.mean and lossy:
        full = board.mean["full"][0]
        near = [m for m, a in lossy.items() if a >= full - 0.01 and board.bytes[m]["device_bytes"] > 0]
        without = f" (without {', '.join(board.at_chance)})" if board.at_chance else ""
        text = f"The full cache answers {100 * full:.1f} % on average{without}"
        for away in (False, True):  # what lives on the device alone, then what keeps all on the host
            kept = [m for m in near if (board.bytes[m]["host_bytes"] > 0.5) == away]
            if kept:
                least = min(kept, key=lambda m: board.bytes[m]["device_bytes"])
                share = 100 * board.bytes[least]["device_bytes"]
                held = f"{share:.0f} %" if share >= 1 else f"{share:.1g} %"
                where = " on the device, the rest on the host" if away else ""
                text += f"; {least} stays within one point of it with {held} of its bytes{where}"
        worst = min(lossy, key=lossy.get)
        if lossy[worst] < full - 0.01:
            text += f"; {worst} loses most, {100 * (full - lossy[worst]):.1f} points"
        parts.append(text + ".")
    if board.contexts:
        longest = board.contexts[-1]
        full, slow = board.timing("full", longest), board.timing("recompute", longest)
        if full and slow and max(full.get("waited", 0), slow.get("waited", 0)) <= BUSY:
            factor = slow["decode_ms"] / full["decode_ms"]
            parts.append(
                f"Without a cache a token takes {factor:.0f} times as long at {longest} tokens "
                f"({slow['decode_ms']:.0f} ms instead of {full['decode_ms']:.1f})."
            )
    return " ".join(parts)


def share(value: float | None) -> str:
    """A share in per cent: 12.5 %, 0."""
    return "–" if value is None else "0" if value == 0 else f"{100 * value:.1f} %"


@dataclass(frozen=True)
class Column:
    """One number of the speed table. A row of an older cell that lacks it shows "–".

    key: in a row of speed.json. head, unit: two lines at its top on the page. terminal: these in the
    terminal, None if it is for the page only. `{context}` in them is replaced by the context. text: value ->
    printed text. everywhere: shown at every context, not only the longest. spread: the page shows KEY_min and
    KEY_max too.
    """

    key: str
    head: str
    unit: str
    terminal: str | None
    text: Callable[[float], str]
    everywhere: bool = False
    spread: bool = False

    def shown(self, row: dict | None) -> str:
        value = (row or {}).get(self.key)
        return "–" if value is None else self.text(value)

    def range(self, row: dict | None) -> str:
        """[smallest, largest repeat], or nothing where these are not told."""
        ends = [(row or {}).get(f"{self.key}_{end}") for end in ("min", "max")]
        return f"[{self.text(ends[0])}, {self.text(ends[1])}]" if self.spread and None not in ends else ""

    def at(self, contexts: list[int]) -> list[int]:
        """The contexts at which it is shown."""
        return contexts if self.everywhere else contexts[-1:]


COLUMNS = (
    Column("decode_ms", "decode", "ms/token at {context}", "ms/tok\n@{context}", "{:.2f}".format, True, True),
    Column("prefill_ms", "prefill", "ms at {context}", None, "{:.0f}".format),
    Column("device_bytes", "device", "at {context}", None, size),
    Column("host_bytes", "host", "at {context}", None, size),
    Column("moved_bytes", "moved", "per step", None, size),
    Column("read_gbps", "read", "GB/s", "read\nGB/s", "{:.1f}".format),
    Column("fraction_of_bandwidth", "of the", "bandwidth", None, share),
)
