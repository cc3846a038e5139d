"""Simulate: the schedule of an offloading cache, event by event, for links and models that are not here."""

from __future__ import annotations

from dataclasses import dataclass

from ..arithmetic import LAUNCHES, Machine
from ..link import Link, ModelledLink
from ..models import ModelShape
from ..parameters import check_one_of
from .timeline import Span, Timeline

# When a layer's fetch is requested: when the previous layer is about to attend, or right after its rehearsal;
# by a rehearsal, when the previous layer begins; when the layer has its query; never, since everything is on
# the device.
AHEAD, REHEARSED, NEEDED, NEVER = "ahead", "rehearsed", "needed", "never"


@dataclass(frozen=True)
class Work:
    """One layer in one decode step: seconds of computation, bytes to fetch and to write back."""

    project: float
    attention: float
    ffn: float
    selection: float = 0.0
    ask: str = NEVER
    fetch: int = 0
    write: int = 0


def simulate(steps: list[list[Work]], link: Link) -> Timeline:
    """Play the schedule of `Host` for decode steps of some layers each; returns the same timeline that
    `timeline.record` would, without what a step does outside its layers.

    The model computes one thing after another; each lane of the link serves one transfer after another, in
    the order asked for, `link.seconds(bytes)` each. The first step's first layer finds its prefetch asked
    for at time 0.
    """
    spans, lanes, now, step = [], {"to device": 0.0, "to host": 0.0}, 0.0, 0
    order = [(step, layer, work) for step, layers in enumerate(steps) for layer, work in enumerate(layers)]
    due: dict[int, float] = {}  # layer -> when what it asked for is there
    written: dict[int, float] = {}  # layer -> when its last write is

    def compute(what: str, layer: int, seconds: float) -> None:
        nonlocal now
        if seconds > 0:
            spans.append(Span("compute", what, layer, step, now, now + seconds))
            now += seconds

    def carry(lane: str, what: str, layer: int, size: int) -> float:
        start = max(now, lanes[lane])
        lanes[lane] = end = start + link.seconds(size)
        spans.append(Span(lane, what, layer, step, start, end, size, now))
        return end

    def ask(layer: int, work: Work, what: str) -> None:
        compute("stall", layer, written.pop(layer, now) - now)  # the store must hold what is to be read
        due[layer] = carry("to device", what, layer, work.fetch)

    def look_ahead(at: int) -> None:
        for _, layer, work in order[at + 1 : at + 2]:  # what attends next, in this step or the next one
            if work.ask == AHEAD and layer not in due:
                ask(layer, work, "prefetch")

    look_ahead(-1)
    for at, (step, layer, work) in enumerate(order):
        rest = steps[step][layer + 1 :]
        if rest and rest[0].ask == REHEARSED:
            compute("selection", layer + 1, rest[0].selection)
            ask(layer + 1, rest[0], "prefetch")
            look_ahead(at + 1)
        compute("project", layer, work.project)
        look_ahead(at)
        if work.ask != NEVER and layer not in due:  # a model of one layer has no other to fetch for
            compute("selection", layer, work.selection)
            ask(layer, work, "fetch")
        if work.write:
            written[layer] = carry("to host", "write", layer, work.write)
        if layer in due:
            compute("stall", layer, due.pop(layer) - now)
        compute("attention", layer, work.attention)
        compute("ffn", layer, work.ffn)
    return Timeline(spans)


SYSTEMS = {  # when each asks for a layer's tokens
    "full": NEVER, "uvm": NEEDED, "uvm+h2o": NEVER, "offload": AHEAD, "offload+int4": AHEAD,
    "offload+h2o": AHEAD, "topk": NEEDED, "infinigen": REHEARSED,
}  # fmt: skip
H2O, BITS = 0.2, 4.25  # part of the tokens that h2o holds; bits of a quantized value, its scale included


def decode_works(
    system: str, machine: Machine, shape: ModelShape, tokens: int, batch: int, *,
    fetched: float = 0.1, ratio: float = 0.3, launches: float | None = None,
) -> list[Work]:  # fmt: skip
    """The layers of one decode step of a system on a machine, by a roofline, in 16 bits.

    tokens: held per row before the step; h2o holds a fifth, for which unified memory has room. fetched: part
    of the tokens that `topk` and `infinigen` fetch; ratio: part of the columns in the partial key cache.
    launches: seconds that the host needs for a layer's operators, if measured: no part is shorter than its
    share. `infinigen` rehearses with the chosen columns of W_q alone, as in the paper and in folded models
    here (RoPE needs all of W_q). Projections read their weights or compute, whichever is longer;
    attention reads K and V; every part pays for its launches. Quantization, top-k and page tables cost what
    they read and nothing else.
    Raises ValueError for another system.
    """
    check_one_of("system", system, SYSTEMS)
    h, token = shape.hidden, 4 * batch * shape.kv_heads * shape.head_dim  # bytes of K and V of a token
    held = tokens * (H2O if "h2o" in system else 1.0)
    chosen = system in ("topk", "infinigen")
    small = BITS / 16 if "int4" in system else 1.0

    def matrix(values: float) -> float:
        return max(2 * values / machine.memory, 2 * batch * values / machine.flops)

    def launched(seconds: float, share: float) -> float:
        return seconds + LAUNCHES * share if launches is None else max(seconds, launches * share)

    kv_share = shape.kv_heads / shape.heads
    layers = []
    for layer in range(shape.layers):
        whole = not chosen or (system == "infinigen" and layer < 2)
        attended = held if whole else tokens * fetched
        read = token * attended / machine.memory * (1 + small if small < 1 else 1)
        selection = 0.0
        if not whole:  # all keys where topk's scores are computed, some columns for infinigen
            columns = 1.0 if system == "topk" else ratio
            where = machine.host_memory if system == "topk" else machine.memory
            guess = matrix(ratio * h**2) if system == "infinigen" else 0.0
            selection = launched(guess + token / 2 * columns * tokens / where, 1 / 2)
        left = 1.0 if whole or launches is None else 1 / 2  # of the launches, besides the selection's
        rest = launched(matrix(9 * h**2), left / 2)
        project = launched(matrix((1 + 2 * kv_share) * h**2), left / 4)
        asked = AHEAD if chosen and whole else SYSTEMS[system]
        fetch = 0 if asked == NEVER else int(token * attended * small)
        write = 0 if asked == NEVER else int(token * small)
        layers.append(Work(project, launched(read, left / 4), rest, selection, asked, fetch, write))
    return layers


def link_of(machine: Machine, system: str, page: int = 65536, fault: float = 2e-6) -> ModelledLink:
    """The machine's link as the system uses it: unified memory moves pages and pays for their faults."""
    link = ModelledLink(machine.link)
    return link.paged(page, fault) if system.startswith("uvm") else link
