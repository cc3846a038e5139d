"""The parts of `python -m eval gpu` that run only where a GPU is, with a CPU in its place.

Events, streams, graphs and memory counters are stand-ins that do nothing wrong; so names, arguments and the
order of calls are tried, and what a failure does, but no number.
"""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from fast import replayed
from triton_here import needs_triton

from eval.gpu import models, right, step
from eval.gpu.bench import Bench
from eval.gpu.unit import FIRST, Unit
from eval.gpu.worker import measured
from kvlab import late
from kvlab.fast import graph


class Event:
    def __init__(self, enable_timing: bool = False):
        self.at = None

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at is not None, "waited for before it was recorded"

    def elapsed_time(self, end) -> float:
        return (end.at - self.at) * 1e3


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other) -> None:
        assert isinstance(other, Stream)

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        assert event.at is not None, "waited for before it was recorded"


class Graph:
    """Remembers what was done while it was captured as one call, the body's."""

    def replay(self) -> None:
        pass


@pytest.fixture
def bench(monkeypatch):
    """A Bench that takes the CPU for a GPU."""
    now = [Stream()]
    state = SimpleNamespace(mode="default", capturing=False, graphs=0, set=[])

    @contextlib.contextmanager
    def stream(one):
        before, now[0] = now[0], one
        yield
        now[0] = before

    class Capture:
        def __init__(self, graph):
            assert isinstance(graph, Graph)

        def __enter__(self):
            state.capturing, now[0] = True, Stream()

        def __exit__(self, *error):
            state.capturing = False
            state.graphs += 1
            if error[0]:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            now[0] = Stream()

    def mode(which):
        state.mode = which

    card = SimpleNamespace(
        total_memory=8 * 10**10,
        multi_processor_count=132,
        L2_cache_size=2**14,
    )
    stand_ins = {
        "synchronize": lambda *given: None, "Event": Event, "Stream": Stream, "stream": stream,
        "current_stream": lambda *given: now[0], "set_stream": state.set.append, "CUDAGraph": Graph,
        "graph": Capture, "memory_allocated": lambda: 1000, "memory_reserved": lambda: 2000,
        "get_device_name": lambda: "Pretended", "get_device_capability": lambda: (9, 0),
        "empty_cache": lambda: None, "is_available": lambda: True,
        "device": lambda device: contextlib.nullcontext(),
        "mem_get_info": lambda: (2**31, 2**32), "set_sync_debug_mode": mode,
        "get_device_properties": lambda *given: card,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    new_empty = torch.Tensor.new_empty
    patched = {
        "is_pinned": lambda self: True, "record_stream": lambda self, stream: None,
        "new_empty": lambda self, *size, pin_memory=False, **more: new_empty(self, *size, **more),
    }  # fmt: skip
    for name, stand_in in patched.items():
        monkeypatch.setattr(torch.Tensor, name, stand_in)
    with torch.device("cpu"):
        torch.empty(1), torch.ones(1)  # torch remembers which functions a device applies to: not the stand-in
    for name in ("empty", "ones"):
        plain = getattr(torch, name)
        unpinned = lambda *given, pin_memory=False, plain=plain, **more: plain(*given, **more)
        monkeypatch.setattr(torch, name, unpinned)
    made = Bench(dry=False)
    made.device = torch.device("cpu")
    made.state = state
    yield made
    assert state.mode == "default" and not state.capturing


def test_the_clock_graphs_and_memory(bench):
    assert bench.once(lambda: time.sleep(0.01)) >= 10
    calls = []
    replay = bench.captured(lambda: calls.append(bench.state.mode))
    assert calls == ["default", "error", "default", "default", "default", "default"] and replay() is None
    assert bench.free_bytes() == 2**31 + 1000


def test_a_body_that_waits_is_refused_before_it_is_captured(bench):
    def body():
        if bench.state.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        bench.captured(body)
    assert bench.state.graphs == 0 and not bench.spoiled


def test_a_capture_that_fails_ends_the_process_after_its_unit(bench):
    def body():
        if bench.state.capturing:
            raise ValueError("not in a capture")

    with pytest.raises(RuntimeError, match="during capture"):
        bench.captured(body)
    assert bench.spoiled and len(bench.state.set) == 1, "the stream from before is in force again"
    kind, _, spoiled = measured(bench, Unit("link", "copies", FIRST, 1, {"sizes": [4096]}))
    assert kind == "done" and spoiled


@pytest.mark.parametrize("way", step.WAYS)
def test_a_step(bench, way, monkeypatch):
    monkeypatch.setattr(graph, "captured", replayed.captured)
    monkeypatch.setattr(late, "capturing", lambda: False)
    monkeypatch.setattr(step, "REPEATS", 2)
    monkeypatch.setattr(step, "LOOP", {"eager": 1, "graph": 2})
    monkeypatch.setattr(models, "graphed", lambda model: setattr(model, "forward", graph.Forward(model)))
    methods = ["static", "static-int8", "h2o", "hf-dynamic", "hf-static"]
    rows = step.measure(bench, "small-llama", 40, 2, methods, way)["rows"]
    assert [row["method"] for row in rows if row["ms"] >= 0 and row["bytes"] > 0] == methods
    assert bench.state.graphs == (2 if way == "graph" else 0)  # transformers' caches; ours have an engine


@needs_triton
@pytest.mark.parametrize("way", ["host", "device"])
def test_a_real_link_says_what_none_says(bench, monkeypatch, way):
    """`CudaLink` itself, whichever of its ways is taken; the Triton gather is interpreted."""
    from kvlab.link import cuda

    class Here(cuda.CudaLink):
        def __init__(self, device):
            super().__init__("cuda")
            self.device = torch.device(device)
            self._rows = self._rows if way == "device" else None

    monkeypatch.setattr("kvlab.place.CudaLink", Here)
    monkeypatch.setattr(right, "STEPS", 2)
    monkeypatch.setattr(right, "gathered", lambda bench: [])
    rows = right.links(bench, right.LINKED[::2], small=True)
    assert [row["link"] for row in rows] == ["Here"] * 3
    assert all(row["right"] for row in rows), rows
