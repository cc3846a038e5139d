"""Every stage of `python -m eval gpu` in small, as far as a CPU goes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvlab
from eval.gpu import headline, models, right, step
from eval.gpu.bench import out_of_memory
from eval.gpu.plan import Gpu
from eval.gpu.unit import FIRST, Unit
from eval.gpu.worker import measured
from kvlab.models import blocks_of

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton (pip install triton), which torch's CPU build leaves out",
)


@pytest.mark.parametrize("unit", Gpu(dry=True, stages=("link", "step")).units(), ids=lambda u: u.task)
def test_a_stage_measures_something_of_every_unit(bench, unit):
    kind, found, spoiled = measured(bench, unit)
    assert kind == "done", found
    rows = found["rows"]
    assert rows and not spoiled
    json.dumps(rows, allow_nan=False)
    timed = [row["ms"] for row in rows]
    assert timed and all(value > 0 for value in timed)
    assert found["line"]


def test_the_headline_sets_every_system_beside_flexgen_the_ideal_and_the_simulator(bench):
    given = {"model": "small-opt", "prompt": 64, "batch": 2}
    found = headline.measure(bench, **given, systems=["full", "offload", "infinigen"])
    assert {(row["system"], row["link"]) for row in found["rows"][:-1]} == {
        (system, link) for system in ("full", "offload", "infinigen") for link in ("real", "throttled")
    }
    assert found["rows"][-1]["link"] > 0, "what the simulator was told"
    for row in found["rows"][:-1]:
        assert row["predicted_ms"] > 0
        assert row["error"] == pytest.approx(100 * (row["predicted_ms"] / row["ms"] - 1))
        assert row["error_total"] == pytest.approx(100 * (row["predicted_total_s"] / row["total_s"] - 1))
        assert row["prefill_modelled"] == (row["link"] == "throttled" and row["system"] != "full")
        assert row["total_s"] == pytest.approx(row["prefill_s"] + 128 * row["ms"] / 1e3)
    by = {(row["system"], row["link"]): row for row in headline.beside(found["rows"])}
    assert by["offload", "real"]["faster"] == by["full", "real"]["of_ideal"] == 1
    assert by["infinigen", "real"]["moved_bytes"] < by["offload", "real"]["moved_bytes"]
    assert by["full", "real"]["moved_bytes"] == 0


def test_a_throttled_link_is_as_slow_as_it_says(bench):
    link = headline.throttled(bench)
    assert link.seconds(10**9) == 0
    link.bandwidth = 1e9
    assert link.seconds(10**9) == pytest.approx(1, rel=1e-3)
    assert link.paged(65536, 2e-6) is link
    assert link.seconds(65536 * 10 + 1) == pytest.approx(11 * (2e-6 + 65536e-9))


@needs_triton
def test_attention_sets_kernels_beside_flash(bench):
    (unit,) = Gpu(dry=True, stages=("attention",)).units()
    kind, found, _ = measured(bench, unit)
    assert kind == "done", found
    rows = {row["kernel"]: row for row in found["rows"]}
    assert {"bf16 flash", "bf16 flash, group as queries", "kvlab int8"} <= set(rows)
    flash = min(rows[name]["ms"] for name in ("bf16 flash", "bf16 flash, group as queries"))
    ours = rows["kvlab int8"]
    assert ours["speedup"] == pytest.approx(flash / ours["ms"])
    assert ours["bytes"] == 2 * 2 * 2 * 160 * (64 + 2), "K and V, 2 rows, 2 heads: codes and an fp16 scale"
    assert rows["bf16 flash"]["bytes"] == 2 * 2 * 2 * 160 * 64 * 2
    assert ours["from_flash"] < 0.02


@needs_triton
def test_kernels_are_held_against_their_definition(bench):
    from kvlab.fast import gpu

    rows = right.kernels(bench, "fp32", [*right.FORMS, *right.KIVIS], small=True)
    assert {row["kernel"] for row in rows} == set(right.FORMS) | set(right.KIVIS)
    assert all(row["right"] for row in rows)
    case = right.cases("int8", "fp32", small=True)[0] | {"dtype": "fp32"}

    class Wrong:
        @staticmethod
        def attend(*arguments, **more):
            return gpu.attend(*arguments, **more) * 1.001

    assert not right.compared(bench, Wrong, right.FORMS["int8"](), case, 0)["right"]

    class Unwritten:
        @staticmethod
        def attend(*arguments, **more):
            return gpu.attend(*arguments, **more) * torch.nan

    assert not right.compared(bench, Unwritten, right.FORMS["int8"](), case, 0)["right"]


def test_a_method_that_differs_from_its_cpu_self_is_not_right(bench, monkeypatch):
    some = ["full", "sinks"]
    assert all(row["right"] for row in right.methods(bench, some, small=True))
    plain = right.logits_of

    def off(model, *given, **more):
        return plain(model, *given, **more) + (0.01 if model.dtype == torch.bfloat16 else 0.0)

    monkeypatch.setattr(right, "logits_of", off)
    rows = right.methods(bench, some, small=True)
    assert all(row["right"] for row in rows), (
        "the CPU's own bf16 is as far off, so nothing is said of the device"
    )
    monkeypatch.setattr(right, "logits_of", lambda *given, **more: 1 / 0)
    rows = right.methods(bench, some, small=True)
    assert not any(row["right"] for row in rows) and "ZeroDivisionError" in rows[0]["error"]


def test_links_say_what_no_link_says(bench):
    assert all(row["right"] for row in right.links(bench, ["offload", "uvm", "infinigen"], small=True))


# Models and caches.


def test_models_have_the_published_sizes():
    assert models.weight_bytes("OPT-13B") == pytest.approx(25.7e9, rel=0.01)
    assert models.weight_bytes("Llama-3-8B") == pytest.approx(16.06e9, rel=0.01)
    assert models.kv_bytes("OPT-13B", 2048, 1) == 2 * 2 * 40 * 5120 * 2048
    assert models.kv_bytes("Llama-3-8B", 1, 1) == 131072


def test_models_for_methods_share_the_weights_and_no_hooks(bench):
    plain, theirs, hooked = (
        models.for_method(bench, "small-llama", method)
        for method in ("full", "hf-static", "infinigen:budget=0.1")
    )
    assert hooked is models.for_method(bench, "small-llama", "infinigen") is not plain
    weights = [{p.data_ptr() for p in model.parameters()} for model in (plain, theirs, hooked)]
    assert weights[0] == weights[1] == weights[2]
    assert theirs is not plain
    kvlab.make_cache(hooked, "infinigen")
    hooks = [
        sum(len(block._forward_pre_hooks) for block in blocks_of(model)) for model in (plain, theirs, hooked)
    ]
    assert hooks[0] == hooks[1] == 0 < hooks[2]


@pytest.mark.parametrize("method", ["full", "static", "static-int4", "h2o", "hf-dynamic", "hf-static"])
def test_caches_are_filled_as_a_prompt_would(bench, method):
    run = step.Run(bench, "small-llama", method, 40, 2)
    run.step()
    seen = run.cache.get_seq_length() if run.theirs else run.cache.stats().tokens_seen
    assert int(seen) == 41 and run.bytes() > 0


def test_the_fastest_of_the_same_precision_stands_beside():
    times = {
        "full": 10.0,
        "int4": 6.0,
        "int2:group=32": 6.0,
        "hf-dynamic": 8.0,
        "hf-static": 5.0,
        "hf-fp8": 4.0,
    }
    same = {"model": "m", "tokens": 1, "batch": 1, "way": "eager"}
    rows = [{"method": name, "bits": step.bits(name), "ms": ms} | same for name, ms in times.items()]
    rows.append(rows[4] | {"way": "graph", "ms": 2.0})
    found = {row["method"]: row for row in step.beside(rows)[:-1]}
    assert (found["full"]["theirs"], found["full"]["theirs_best"]) == (2, 5)
    assert found["int4"]["theirs"] is found["int2:group=32"]["theirs"] is None, "they have no cache so small"
    assert [step.bits(name) for name in ("static-fp8", "kivi4", "h2o", "static")] == [8, 4, 16, 16]


# Too little memory.


def test_a_batch_that_does_not_fit_shrinks_and_says_to_what(bench, monkeypatch):
    monkeypatch.setattr(type(bench), "free_bytes", lambda self: 15e9)
    row = models.kv_bytes("OPT-13B", 1920 + 128, 1)
    monkeypatch.setattr(headline.psutil, "virtual_memory", lambda: SimpleNamespace(available=1e12))
    assert headline.fitting(bench, "OPT-13B", 1920, 20) == int(10e9 // row) == 5
    assert bench.said == ["OPT-13B, 1920 tokens: batch 20 does not fit into memory: 5 instead"]


def test_memory_errors_are_known():
    assert out_of_memory(torch.OutOfMemoryError("x")) and out_of_memory(MemoryError("x"))
    assert out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_machine_without_pinned_memory_is_one_line(bench, monkeypatch):
    def refuse(*given, **more):
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr("eval.gpu.link.pinned", refuse)
    kind, (line, traceback), _ = measured(bench, Unit("link", "copies", FIRST, 1, {"sizes": [4096]}))
    assert kind == "failed"
    assert line == "RuntimeError: CUDA error: operation not supported" and "in refuse" in traceback


def test_a_method_that_fails_leaves_the_others(bench, monkeypatch):
    plain = kvlab.make_cache

    def make(model, spec):
        if spec.name == "h2o":
            raise RuntimeError("no kernel image is available")
        return plain(model, spec)

    monkeypatch.setattr(kvlab, "make_cache", make)
    found = step.measure(bench, "small-llama", 32, 1, ["full", "h2o"], "eager")
    rows = {row["method"]: row for row in found["rows"]}
    assert "no kernel image" in rows["h2o"]["left_out"] and rows["full"]["ms"] > 0
