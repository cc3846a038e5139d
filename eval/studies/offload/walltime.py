"""Experiment `link`: wall time over a modelled link, every method and the ideal in turn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace

import psutil
import torch

import kvlab
from kvlab.arithmetic import kv_bytes_per_token
from kvlab.measure.machines import fill_random
from kvlab.measure.simulate import AHEAD, NEEDED, NEVER, REHEARSED, Work, simulate
from kvlab.measure.timeline import COMPUTE, Timeline, record
from kvlab.models import ModelShape
from kvlab.spec import parse

from ...core.errors import Problem
from ...speed import models
from .published import MEASURED, MODELLED, SIMULATED, row

IDEAL, INFINIGEN = "full", "infinigen:budget=0.1"
LINKED = ("uvm", "offload", "offload+int4", "offload+h2o", "topk:budget=0.1", INFINIGEN)
WIDE_LAYERS, WIDE_TOKENS, REPEATS = 16, 8192, 7
BOUND = 6  # a layer's transfer takes so many times its computation, as measured in the same round
FAST = 1e12  # bytes per second: no step waits for this link
BURST = 2  # steps of one method that are counted before the next one has its turn


def wide_model(layers: int, context: int):
    """The speed suite's wider random-weight Llama with more layers: of its 4, InfiniGen reads 2 whole."""
    return kvlab.prepare(
        models.wide_model(num_hidden_layers=layers, max_position_embeddings=context, vocab_size=512)
    )


def filled(model, method, tokens: int):
    """A cache of the method holding random K and V of `tokens` tokens."""
    cache = kvlab.make_cache(model, method)
    fill_random(model, cache, tokens)
    return cache


@torch.no_grad()
def steps(model, cache, count: int) -> list[float]:
    """Milliseconds of each of `count` decode steps; the tokens do not matter."""
    ids, times = torch.zeros(1, 1, dtype=torch.long, device=model.device), []
    for _ in range(count):
        begun = time.perf_counter()
        model(ids, past_key_values=cache)
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def burst(model, cache) -> tuple[list[float], Timeline]:
    """Milliseconds of `BURST` steps, and their timeline. A step before them is not counted: what it waits for
    was asked for before somebody else had his turn. Nothing is under way afterwards."""
    steps(model, cache, 1)
    with record(model, cache) as timeline:
        times = steps(model, cache, BURST)
    return times, timeline


@dataclass
class Found:
    """What the rounds found of one method."""

    rounds: list[list[float]] = field(default_factory=list)  # ms of the counted steps
    simulated: list[float] = field(default_factory=list)  # ms/token, one prediction per round
    timelines: list[Timeline] = field(default_factory=list)  # one per round

    @property
    def steps(self) -> list[float]:
        """ms of every counted step."""
        return [time for times in self.rounds for time in times]

    @property
    def median(self) -> float:
        """ms/token."""
        return statistics.median(self.steps)

    def over(self, other: Found) -> float:
        """How many times as long as the other method: the median of the rounds."""
        return statistics.median(sum(a) / sum(b) for a, b in zip(self.rounds, other.rounds, strict=True))

    def predicted(self) -> float:
        """Simulated over measured: the median of the rounds."""
        pairs = zip(self.simulated, self.rounds, strict=True)
        return statistics.median(played / statistics.mean(times) for played, times in pairs)

    def part(self, what: str) -> float:
        """ms/token spent on it: the median of the rounds."""
        return statistics.median(timeline.total(what) * 1e3 / BURST for timeline in self.timelines)


def works(timeline: Timeline) -> list[list[Work]]:
    """The work that a recorded timeline shows: what each layer computed and asked for at each step.

    Record it over a link that is fast enough not to matter; what the first layer of the first step had asked
    for before the recording began is taken to be what it asked for next.
    """
    seconds: dict = defaultdict(float)
    for span in timeline.compute:
        seconds[span.what, span.step, span.layer] += span.seconds
    carried = {}
    for span in timeline.transfers:
        early = span.layer == 0 and span.what == "prefetch"  # for the step after
        carried[span.lane, span.step + early, span.layer] = span
    steps = 1 + max(span.step for span in timeline.compute)
    layers = 1 + max(span.layer for span in timeline.compute)
    found = []
    for step in range(steps):
        row = []
        for layer in range(layers):
            fetch = carried.get(("to device", step, layer)) or carried.get(("to device", step + 1, layer))
            write = carried.get(("to host", step, layer))
            project, attention, ffn, selection = (
                seconds[what, step, layer] for what in ("project", "attention", "ffn", "selection")
            )
            kinds = {"fetch": NEEDED, "prefetch": REHEARSED if selection else AHEAD}
            ask = kinds[fetch.what] if fetch else NEVER
            sizes = (span.bytes if span else 0 for span in (fetch, write))
            row.append(Work(project, attention, ffn, selection, ask, *sizes))
        found.append(row)
    return found


def one_turn(model, cache, found: Found, bandwidth: float = FAST) -> None:
    """One method's turn of a round: over its link, and before that over one too fast to wait for, whose parts
    the simulator puts together again."""
    link = cache.layers[0].place.link  # which all layers share
    if link is not None:
        link.bandwidth = FAST
        parts = works(burst(model, cache)[1])
        link.bandwidth = bandwidth
    times, timeline = burst(model, cache)
    found.rounds.append(times)
    found.timelines.append(timeline)
    if link is not None:
        outside = sum(times) - timeline.seconds * 1e3  # the layers' share is predicted
        played = simulate(parts, link).seconds * 1e3
        found.simulated.append((played + outside) / BURST)


def link(tokens: int | None = None, layers: int | None = None, repeats: int = REPEATS) -> dict:
    """6. Wall time over a modelled link to which whole-layer offloading is bound, beside the ideal.

    Every method holds its cache throughout (9 GB in all), and all take turns. Every round begins with the
    ideal, and sets the link's bandwidth by it: so the rounds of a noisy machine can be compared. InfiniGen
    comes right after it. Also returns the last step of every method as `timelines`, {method: spans}. Raises
    Problem where memory does not suffice.
    """
    tokens, layers = tokens or WIDE_TOKENS, layers or WIDE_LAYERS
    context = tokens + 8 + 2 * (BURST + 1) * repeats
    model = wide_model(layers, context)
    size = kv_bytes_per_token(ModelShape.of(model), 32) / layers * tokens
    check_memory(7.5 * layers * size)  # of all that is held at once, five are whole caches
    caches = {IDEAL: filled(model, f"static:length={context}", tokens)}
    for method in reversed(LINKED):  # InfiniGen is last in the table, and first to play
        spec = parse(method)
        linked = replace(spec, parameters=spec.parameters | {"link": FAST})
        caches[method] = filled(model, linked, tokens)
    found, bandwidths = {method: Found() for method in caches}, []
    one_turn(model, caches[IDEAL], Found())  # the first steps pay for what is made once
    for _ in range(repeats):
        one_turn(model, caches[IDEAL], found[IDEAL])
        per_layer = statistics.median(found[IDEAL].rounds[-1]) / 1e3 / layers
        bandwidths.append(size / (BOUND * per_layer))
        for method in list(caches)[1:]:
            one_turn(model, caches[method], found[method], bandwidths[-1])
    timelines = {method: last_step(found[method].timelines[-1]) for method in LINKED}
    return {"rows": rows_of(found, statistics.median(bandwidths), tokens), "timelines": timelines}


def check_memory(needed: float) -> None:
    """Problem where less than `needed` bytes are free: better than being killed half-way."""
    free = psutil.virtual_memory().available
    if free < needed:
        raise Problem(
            f"experiment link holds all caches at once and needs {needed / 1e9:.1f} GB of memory, but "
            f"{free / 1e9:.1f} are free; finished experiments are kept, choose others with --experiments"
        )


def rows_of(found: dict[str, Found], bandwidth: float, tokens: int) -> list[dict]:
    """Medians, the quickest and slowest step, and how the methods compare."""
    name, ideal = "link", found[IDEAL]
    rows = [
        row(name, "ideal", ideal.median, "ms/token", MEASURED, tokens),
        *spread(name, "ideal", ideal, MEASURED, tokens),
        row(name, "bandwidth of the link", bandwidth / 1e9, "GB/s", MODELLED, tokens),
    ]
    for method in LINKED:
        runs = found[method]
        played = statistics.median(runs.simulated)
        rows += [
            row(name, method, runs.median, "ms/token", MODELLED, tokens),
            *spread(name, method, runs, MODELLED, tokens),
            row(name, method, played, "ms/token", SIMULATED, tokens),
            row(name, f"{method}: simulated over measured", runs.predicted(), "times", SIMULATED, tokens),
            row(name, f"{method}: over the ideal", runs.over(ideal), "times", MODELLED, tokens),
        ]
        rows += [
            row(name, f"{method}: {what}", runs.part(what), "ms/token", MODELLED, tokens) for what in COMPUTE
        ]
    speedup = found["offload"].over(found[INFINIGEN])
    return [*rows, row(name, "infinigen: faster than offload", speedup, "times", MODELLED, tokens)]


def spread(name: str, system: str, runs: Found, kind: str, tokens: int) -> list[dict]:
    """The quickest and the slowest step."""
    ends = {"quickest": min(runs.steps), "slowest": max(runs.steps)}
    return [row(name, f"{system}: {end}", value, "ms/token", kind, tokens) for end, value in ends.items()]


def last_step(timeline: Timeline) -> list[dict]:
    """The spans of a recorded run's last step."""
    step = timeline.steps(max(span.step for span in timeline.compute))
    return [asdict(span) for span in step.spans]


EXPERIMENTS = {"link": link}
