"""Timeline: the time of a decode step, layer by layer, and the link's transfers meanwhile."""

from __future__ import annotations

import bisect
import json
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..models import blocks_of

COMPUTE = ("project", "selection", "stall", "attention", "ffn")


@dataclass(frozen=True)
class Span:
    """One stretch of time. Times are seconds; a recorded timeline starts at 0 with its first step."""

    lane: str  # "compute", "to device" or "to host"
    what: str  # on compute: one of COMPUTE; on the link: "prefetch", "fetch" or "write"
    layer: int
    step: int
    start: float
    end: float
    bytes: int = 0  # carried
    submitted: float | None = None  # when a transfer was asked for

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """A list of spans. On the compute lane they do not overlap:

    project: norm and projections before attention; selection: choosing what to fetch; stall: waiting for the
    link; attention; ffn: output projection, feed-forward and what follows up to the next layer.
    """

    def __init__(self, spans: list[Span] | None = None):
        self.spans = [] if spans is None else spans
        self._step, self._layer, self._before = -1, 0, "project"
        self._mark = 0.0

    # Recording (see `record`): every moment of the compute lane belongs to one span.

    def begin(self) -> None:
        """A step begins."""
        self._step, self._layer, self._before = self._step + 1, 0, "project"
        self._mark = time.perf_counter()

    def block(self, layer: int) -> None:
        """Block `layer` begins."""
        self.cut(self._before)
        self._layer, self._before = layer, "project"

    def cut(self, what: str, layer: int | None = None) -> None:
        """The time since the last cut was spent on `what`."""
        now, layer = time.perf_counter(), self._layer if layer is None else layer
        self.spans.append(Span("compute", what, layer, self._step, self._mark, now))
        self._mark = now

    @contextmanager
    def span(self, what: str, layer: int):
        """The time inside belongs to `what`, except for spans within it; the time before, to the outer
        span."""
        self.cut(self._before)
        outside, self._before = self._before, what
        yield
        self.cut(what, layer)
        self._before = "ffn" if what == "attention" else outside

    def end(self, links) -> None:
        """Recording ends: add all that was asked of the links meanwhile, also what arrives only now (the last
        write, a prefetch for a step that never came), and let time start at 0."""
        if not self.spans:
            return
        origin = self.spans[0].start
        starts = [min(s.start for s in self.spans if s.step == step) for step in range(self._step + 1)]
        for link in links:
            link.drain()
            for done in [t for t in link.records if t.submitted >= origin and t.finished]:
                step = bisect.bisect(starts, done.submitted) - 1
                span = Span(f"to {done.toward}", done.why, done.layer, step, done.started, done.finished)
                self.spans.append(replace(span, bytes=done.bytes, submitted=done.submitted))
        self.spans = [_shift(span, -origin) for span in self.spans]

    # Reading.

    def steps(self, first: int, last: int | None = None) -> Timeline:
        """Steps first..last (inclusive; default: that one step) and all that crossed the link meanwhile;
        time starts at 0 with the first of them."""
        last = first if last is None else last
        chosen = [span for span in self.compute if first <= span.step <= last]
        if not chosen:
            raise ValueError(f"step={first}: the timeline holds no such step")
        start, end = min(span.start for span in chosen), max(span.end for span in chosen)
        crossed = [s for s in self.spans if s.lane != "compute" and s.end > start and s.start < end]
        return Timeline([_shift(span, -start) for span in chosen + crossed])

    @property
    def compute(self) -> list[Span]:
        """What the device did."""
        return [span for span in self.spans if span.lane == "compute"]

    @property
    def transfers(self) -> list[Span]:
        """What the link carried."""
        return [span for span in self.spans if span.lane != "compute"]

    @property
    def seconds(self) -> float:
        """From the first step's start to the last one's end, without the time between steps."""
        return sum(span.seconds for span in self.compute)

    def total(self, what: str) -> float:
        """Seconds spent on `what`, summed over layers and steps."""
        return sum(span.seconds for span in self.spans if span.what == what)

    def save(self, path: str | Path) -> None:
        """Write a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        lanes = {"compute": 1, "to device": 2, "to host": 3}
        events = [
            {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        for span in self.spans:
            events.append({
                "ph": "X", "pid": 1, "tid": lanes[span.lane], "name": f"{span.what} {span.layer}",
                "cat": span.lane, "ts": span.start * 1e6, "dur": span.seconds * 1e6, "args": asdict(span),
            })  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _shift(span: Span, by: float) -> Span:
    submitted = None if span.submitted is None else span.submitted + by
    return replace(span, start=span.start + by, end=span.end + by, submitted=submitted)


@contextmanager
def record(model, cache, timeline: Timeline | None = None):
    """Record a timeline (default: a new one) of every decode step inside the `with`, for any method; yields
    the Timeline, which is complete after it.

    On a GPU the compute lane shows when kernels were launched, not when they ran, unless the timeline's `cut`
    waits for them.
    Raises ValueError for a model without a list of layers.
    """
    timeline = Timeline() if timeline is None else timeline
    blocks = blocks_of(model)
    hooks = [model.register_forward_pre_hook(lambda *_: timeline.begin())]
    for index, block in enumerate(blocks):
        hooks.append(
            block.register_forward_pre_hook(lambda *_, index=index: timeline.block(index), prepend=True)
        )
    hooks.append(model.register_forward_hook(lambda *_: timeline.cut("ffn")))
    layers = getattr(cache, "attending", cache.layers)
    for layer in layers:
        layer.timeline = timeline
    try:
        yield timeline
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.timeline = None
        links = {id(layer.place.link): layer.place.link for layer in layers if layer.place.link}
        timeline.end(links.values())
