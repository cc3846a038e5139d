"""The parts of `python -m eval gpu` that run only where a GPU is, with a CPU in its place.

Events, streams, graphs and memory counters are stand-ins that do nothing wrong; so names, arguments and the
order of calls are tried, and what a failure does, but no number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from types import SimpleNamespace

import pytest
import torch

from eval.gpu import about, attention, headline, link, precompile, right, step, throughput
from eval.gpu import bench as clock
from eval.gpu.bench import Bench
from eval.gpu.unit import FIRST, Unit
from eval.gpu.worker import measured

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton (pip install triton), which torch's CPU build leaves out",
)


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
        name="Pretended",
        major=9,
        minor=0,
        total_memory=8 * 10**10,
        multi_processor_count=132,
        L2_cache_size=2**14,
    )
    stand_ins = {
        "synchronize": lambda *given: None, "Event": Event, "Stream": Stream, "stream": stream,
        "current_stream": lambda *given: now[0], "set_stream": state.set.append, "CUDAGraph": Graph,
        "graph": Capture, "memory_allocated": lambda: 1000, "memory_reserved": lambda: 2000,
        "max_memory_allocated": lambda: 5000, "reset_peak_memory_stats": lambda: None,
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
        empty = torch.empty
        empty(1)  # torch remembers which functions a device applies to: not the stand-in
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **more: empty(*given, **more))
    for module in (clock, link):
        monkeypatch.setattr(module, "PRODUCT", 64)  # a CPU may need minutes for what a GPU does in a blink
    made = Bench(dry=False)
    made.device = torch.device("cpu")
    made.state = state
    yield made
    assert state.mode == "default" and not state.capturing


def test_the_clock_graphs_and_memory(bench):
    assert bench.once(lambda: time.sleep(0.01), flush=True) >= 10
    calls = []
    replay = bench.captured(lambda: calls.append(bench.state.mode))
    assert calls == ["default", "error", "default", "default", "default", "default"] and replay() is None
    with bench.peak(bench.allocated()) as found:
        pass
    assert found == {"peak_bytes": 4000}
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
    answer, spoiled = measured(bench, Unit("link", "copies", FIRST, 1, {"what": "copies", "sizes": [4096]}))
    assert answer[0] == "done" and spoiled


def test_a_spoiled_device_fails_the_unit_and_ends_the_process(bench, monkeypatch):
    def sync(*given):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    unit = Unit("link", "copies", FIRST, 1, {"what": "copies", "sizes": [4096]})
    monkeypatch.setattr(Bench, "sync", sync)
    answer, spoiled = measured(bench, unit)
    assert answer[0] == "failed" and "illegal memory access" in answer[1][0] and spoiled


def test_a_step(bench):
    methods = ["full", "static", "static-int8", "h2o"]
    found = step.measure(bench, "small-llama", 40, 2, methods)
    rows = {row["method"]: row for row in found["rows"]}
    for method in (*methods, "hf-dynamic", "hf-static"):
        assert rows[method]["peak_bytes"] == 4000 and rows[method]["graph_ms"] >= 0, rows[method]
    assert rows["static"]["best_times_theirs"] > 0 and rows["hf-hqq"]["left_out"]


@needs_triton
def test_attention(bench, monkeypatch):
    monkeypatch.setattr(attention, "REPEATS", 2)
    monkeypatch.setattr(attention, "flexible", lambda query, scale, share: lambda keys, values: query)
    given = {"shape": "small", "tokens": 96, "batch": 2, "flex": True, "forms": ["int8"]}
    rows = {row["kernel"]: row for row in attention.measure(bench, **given)["rows"]}
    assert rows["bf16 FlexAttention"]["of_torch"] <= 1 >= rows["bf16 flash"]["of_torch"]
    assert rows["kvlab int8"]["graph"] and rows["kvlab int8"]["speedup"] > 0
    assert rows["bf16 flash"]["copies"] > 1 and "runs" in rows["bf16 flash"]


def test_the_link(bench):
    for what, given in (("copies", {"sizes": [4096, 8192]}), ("overlap", {"megabytes": 1})):
        assert link.measure(bench, what, **given)["rows"]


def test_throughput_and_waits(bench, monkeypatch):
    given = {"model": "small-opt", "method": "h2o", "prompt": 16, "new": 16, "largest": 2}
    assert throughput.measure(bench, **given)["rows"][-1]["peak_bytes"] == 4000
    monkeypatch.setitem(right.WHEN_DRY, "waits", ("full", "infinigen"))
    rows = right.waits(bench, small=True)
    assert [row["waits"] for row in rows] == [0, 0] and rows[0]["right"] and rows[1]["right"] is None


def test_the_headline(bench, monkeypatch):
    class Pretended(headline.Throttle, headline.Link):
        def __init__(self, device):
            super().__init__()

    monkeypatch.setattr(headline, "ThrottledCudaLink", Pretended)
    found = headline.measure(bench, "small-opt", 48, 4, ["full", "offload"])
    assert [row.get("left_out") for row in found["rows"]] == [None] * 5
    blocks = {row["link"]: row["block"] for row in found["rows"][:-1] if row["system"] == "offload"}
    assert set(blocks) == {"real", "throttled"}


@needs_triton
@pytest.mark.parametrize("way", ["host", "device"])
def test_a_real_link_says_what_none_says(bench, monkeypatch, way):
    """`CudaLink` itself, whichever of its ways is taken; the Triton gather is interpreted."""
    from kvlab.link import cuda

    class Here(cuda.CudaLink):
        def __init__(self, device):
            super().__init__("cuda")
            self.device = torch.device(device)
            self.trial = cuda.Trial(way)

        def _to_device(self, staged):
            arrived = tuple(part.clone() for part in staged)  # what is on a CPU already is not copied
            super()._to_device(staged)
            return arrived

    monkeypatch.setattr("kvlab.place.CudaLink", Here)
    monkeypatch.setattr(right, "STEPS", 2)
    monkeypatch.setattr(right, "gathered", lambda bench: [])
    rows = right.links(bench, small=True)
    assert [row["link"] for row in rows] == ["Here"] * 3
    assert all(row["right"] for row in rows), rows


def test_what_is_said_of_a_card(bench, monkeypatch):
    found = about.about(dry=False)
    assert (found["device"], found["capability"], found["processors"]) == ("Pretended", "9.0", 132)
    card = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(card, "major", 8)
    assert any("capability 8.0 has no fp8" in line for line in about.about(dry=False)["missing"])
    said = {"driver_version": "580.1", "pcie.link.gen.max,pcie.link.width.max": "5, 16"}
    monkeypatch.setattr(about, "asked", said.get)
    found = about.about(dry=False)
    assert found["driver"] == "580.1" and found["pcie"]["bandwidth"] == pytest.approx(63e9, rel=1e-3)
    rows = link.measure(bench, "copies", sizes=[4096, 8192])["rows"]
    for row in rows:
        ways = 2 if row["copy"] == "both at once" else 1
        assert row["of_pcie"] == pytest.approx(row["gbps"] / 63 / ways, rel=1e-3)
    said.clear()
    assert about.pcie() is None and "of_pcie" not in link.measure(bench, "copies", sizes=[4096])["rows"][0]


@needs_triton
def test_a_card_without_e4m3_leaves_its_rows_out(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda.get_device_properties(0), "major", 8)
    rows = right.kernels(bench, "fp32", small=True)
    without = [row for row in rows if "e4m3" in row["kernel"]]
    assert without and all(row["left_out"] == "capability 8.0" for row in without)
    assert all(row["right"] for row in rows if "e4m3" not in row["kernel"])
    assert not [call for call in precompile.calls((8, 0)) if "e4m3" in repr(call.args)]
    given = {"shape": "small", "tokens": 96, "batch": 2, "flex": False, "forms": ["int8", "fp8:e4m3"]}
    assert "kvlab fp8:e4m3" not in {row["kernel"] for row in attention.measure(bench, **given)["rows"]}


def test_replays_follow_each_other_between_two_events(bench, monkeypatch):
    calls, events = [], []
    monkeypatch.setattr(Event, "record", lambda self: events.append(len(calls)) or setattr(self, "at", 0.0))
    bench.replayed(lambda: calls.append(1))
    assert len(calls) == 10 and events == [0, 10]


@needs_triton
def test_what_runs_under_the_sanitizer(monkeypatch, capsys):
    asked = []
    plain = right.links
    monkeypatch.setattr(right, "LINKED", ("offload",))
    monkeypatch.setattr(right, "links", lambda *given, **more: asked.append(1) or plain(*given, **more))
    right.under_sanitizer(dry=True)
    assert asked and capsys.readouterr().out == "checked\n"
