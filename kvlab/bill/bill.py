"""Bill: the costs of a model on a device: bytes, capacity, floors of time, money, and the first limit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from os import PathLike

from ..arithmetic import cost_per_million, step_floor
from ..errors import nearest
from ..finding import METHODS
from ..parameters import check_number, check_whole, count_of
from ..spec import Spec, name_of, parse
from .account import Account, account, policies, prefill_operations, step_operations, step_weights, weights
from .data import device_named, machine, model_named
from .show import html, text

MOST = {"context": 10**9, "users": 10**6, "price": 10**6}  # what is more is a slip of the hand


@dataclass(frozen=True)
class Line:
    """One method. Bytes are of all users asked for; times are floors, for the users that fit at once.

    users, tokens: most users at this context, longest context of these users (None: no known limit, since the
    bill does not cover the host's memory). step: seconds per token of one user. floors: seconds by each limit
    of a step. cost: of a million tokens. first: the first limit reached. budget: of a method that has one.
    at_most: its fetches depend on the text; its whole budget is counted. refused: why kvlab refuses the
    method on this model; then the rest is empty.
    """

    method: str
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    moved_bytes: float = 0.0
    users: int | None = 0
    tokens: int | None = 0
    step: float | None = None
    floors: dict[str, float] | None = None
    cost: float | None = None
    first: str = ""
    budget: float | int | None = None
    at_most: bool = False
    refused: str | None = None


@dataclass(frozen=True, repr=False)
class Bill:
    """See `bill`. Sizes in bytes, times in seconds, price per hour; lines: one `Line` per method. Prints as
    a table, in a notebook too. `dataclasses.asdict(bill)` is plain JSON."""

    model: str
    device: str
    context: int
    users: int
    price: float | None
    model_context: int | None
    memory: float
    weights_bytes: float
    prefill: float
    prefill_cost: float | None
    lines: list[Line]

    def __getitem__(self, method: str) -> Line:
        """The line of a method, as it was written. KeyError, naming the nearest, for an unknown one."""
        lines = {line.method: line for line in self.lines}
        if method not in lines:
            near = [line for line in lines if name_of(line) == method]
            told = f", did you mean {near[0]}?" if near else nearest(str(method), lines)
            raise KeyError(f"{method!r} is not in this bill{told}")
        return lines[method]

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html(self)


def bill(
    model: str | PathLike,
    device: str,
    context: int | str | None = None,
    users: int = 1,
    price: float | None = None,
    methods=None,
) -> Bill:
    """Lower bounds of every method's bytes held, bytes moved and time, with 16-bit keys and values.

    model: a name in models.json, a folder with a config.json, that file, or a model or GGUF file that `load`
    knows. device: a name in devices.json.
    context: tokens of every user, such as 8192 or "32k" (default: the model's trained length). users: rows
    held at once. price: of the device per hour. methods: specs such as
    "h2o:budget=0.1" (default: every named method).
    Everything is a lower bound: no activations, no fragmentation, no launch and no kernel is charged, so
    nothing real is quicker or smaller, except lines that are `at_most`: they are charged their whole budget,
    and a step may move less. ValueError, one line, for an unknown name or a model that does not fit.
    """
    name, model = model_named(model)
    device, figures = device_named(device)
    context = _context(name, model, context)
    check_whole("users", users, 1, "users", MOST["users"])
    if price is not None:
        expected = f"an amount per hour from 0 to {MOST['price']:,}"
        check_number("price", price, lambda x: 0 <= x <= MOST["price"], expected)
    specs = _specs(methods)
    made = [policies(spec) for spec in specs]
    size = weights(model)
    if size > figures["memory"]:
        raise ValueError(
            f"{name}: its weights take {size / 1e9:.1f} GB and {device} has {figures['memory'] / 1e9:g} GB; "
            "the bill is of one device, so choose a larger one or a smaller model"
        )
    there = machine(figures)
    read = step_weights(model, context) / there.memory
    prefill = max(prefill_operations(model, context) / there.flops, read)
    pairs = zip(specs, made, strict=True)
    return Bill(
        model=name, device=device, context=context, users=users, price=price, model_context=model["context"],
        memory=figures["memory"], weights_bytes=size, prefill=prefill,
        prefill_cost=None if price is None else cost_per_million(price, prefill, context),
        lines=[_line(spec, policy, model, figures, context, users, price) for spec, policy in pairs],
    )  # fmt: skip


def _context(name: str, model: dict, context: int | str | None) -> int:
    known = model["context"]
    if context is None:
        if known is None:
            raise ValueError(f"context: {name} does not say what it was trained for, so name one")
        return known
    context = count_of(context) if isinstance(context, str) else context
    check_whole("context", context, 1, most=MOST["context"])
    if known is not None and context > known:
        raise ValueError(f"context={context}: {name} was trained for {known:,} tokens")
    return context


def _specs(methods) -> list[Spec]:
    if methods is None:
        methods = METHODS
    elif isinstance(methods, str | Spec):
        methods = [methods]
    try:
        methods = [*methods]
    except TypeError:
        methods = []
    if not methods or not all(isinstance(spec, str | Spec) for spec in methods):
        raise ValueError("methods: expected specs such as ['full', 'h2o:budget=0.1']")
    return [parse(spec) for spec in methods]


def _line(spec: Spec, made: dict, model: dict, device: dict, context: int, users: int, price) -> Line:
    try:
        row = account(spec, made, model, context)
    except ValueError as error:
        return Line(spec.text, refused=str(error))
    left = device["memory"] - weights(model)
    fit = int(left // row.device) if row.device else None
    if row.pages and users * row.host <= left:  # unified memory: all of it stays on the device
        row = Account(row.host, read=row.read, operations=row.operations)
    served = users if fit is None else min(users, fit)
    line = {
        "budget": spec.parameters.get("budget", spec.method.parameters.get("budget")), "at_most": row.most,
        "device_bytes": users * row.device, "host_bytes": users * row.host, "moved_bytes": users * row.moved,
        "users": fit, "tokens": _tokens(spec, made, model, left, users),
    }  # fmt: skip
    if not served:
        return Line(spec.text, **line, first="memory")
    there = machine(device)
    size, operations = step_weights(model, served) + served * row.read, served * row.operations
    if spec.name != "recompute":
        operations += served * step_operations(model)
    floors = step_floor(there, size, served * row.moved, operations)
    bound = max(floors, key=floors.get)
    cost = None if price is None else cost_per_million(price, floors[bound], served)
    first = bound if served == users else "memory"
    return Line(spec.text, **line, step=floors[bound], floors=floors, cost=cost, first=first)


def _tokens(spec: Spec, made: dict, model: dict, left: float, users: int) -> int | None:
    """The longest context whose cache of `users` rows takes at most `left` bytes of the device."""
    most = model["context"]
    if most is None:
        return None

    beyond = lambda tokens: users * account(spec, made, model, tokens).device > left
    return bisect_left(range(1, most + 1), True, key=beyond) if beyond(most) else most
