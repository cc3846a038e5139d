"""Every stage of `python -m eval gpu` in small, as far as a CPU goes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import kvlab
from eval.gpu import accuracy, headline, models, right, step, throughput
from eval.gpu.bench import Bench, out_of_memory
from eval.gpu.measurement import Gpu
from eval.gpu.unit import FIRST, Unit
from eval.gpu.worker import measured
from kvlab.models import blocks_of

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton (pip install triton), which torch's CPU build leaves out",
)


@pytest.mark.parametrize(
    "unit", Gpu(dry=True, stages=("link", "step", "throughput")).units(), ids=lambda u: u.task
)
def test_a_stage_measures_something_of_every_unit(bench, unit):
    answer, spoiled = measured(bench, unit)
    assert answer[0] == "done", answer[1]
    rows = answer[1]["rows"]
    assert rows and not spoiled
    json.dumps(rows, allow_nan=False)
    timed = [value for row in rows for key, value in row.items() if key.endswith("ms")]
    assert timed and all(value > 0 for value in timed)
    assert answer[1]["line"]


def test_the_headline_sets_every_system_beside_flexgen_the_ideal_and_the_simulator(bench):
    given = {"model": "small-opt", "prompt": 64, "batch": 2}
    found = headline.measure(bench, **given, systems=["full", "offload", "infinigen"])
    assert {(row["system"], row["link"]) for row in found["rows"][:-1]} == {
        (system, link) for system in ("full", "offload", "infinigen") for link in ("real", "throttled")
    }
    assert found["rows"][-1]["link"] > 0, "what the simulator was told"
    for row in found["rows"][:-1]:
        assert row["predicted"]["step_ms"] > 0
        assert row["error"] == pytest.approx(100 * (row["predicted"]["step_ms"] / row["step_ms"] - 1))
        assert row["error_total"] == pytest.approx(100 * (row["predicted"]["total_s"] / row["total_s"] - 1))
        assert row["prefill_modelled"] == (row["link"] == "throttled" and row["system"] != "full")
        assert row["total_s"] == pytest.approx(row["prefill_s"] + 128 * row["step_ms"] / 1e3)
    by = {(row["system"], row["link"]): row for row in found["rows"][:-1]}
    assert by["offload", "real"]["faster"] == by["full", "real"]["of_ideal"] == 1
    assert by["infinigen", "real"]["moved_bytes"] < by["offload", "real"]["moved_bytes"]
    assert by["full", "real"]["moved_bytes"] == 0
    assert set(by["offload", "real"]["block"]) == set(headline.PARTS)


def test_a_throttled_link_is_as_slow_as_it_says():
    link = headline.ThrottledLink()
    assert link.seconds(10**9) == 0
    link.bandwidth = 1e9
    assert link.seconds(10**9) == pytest.approx(1, rel=1e-3)
    assert link.paged(65536, 2e-6) is link
    assert link.seconds(65536 * 10 + 1) == pytest.approx(11 * (2e-6 + 65536e-9))


def test_accuracy_is_that_of_the_cpu_within_error(bench):
    given = {"name": "workshop", "documents": 2, "tokens": 16, "stories": 1}
    (row,) = accuracy.measure(bench, **given, method="full")["rows"]
    assert row["right"] and row["loss"] == pytest.approx(row["loss_cpu"], rel=0.01)
    assert not accuracy.row("m", "full", (0.5, 2.0), (0.9, 2.0), 100)["right"]
    assert not accuracy.row("m", "full", (0.9, 2.1), (0.9, 2.0), 100)["right"]
    assert accuracy.row("m", "full", (0.86, 2.0), (0.9, 2.0), 100)["right"]


def test_what_a_cpu_said_is_stored_for_these_weights_and_questions():
    """A unit that had to ask the CPU first was ended before it had a row."""
    for method in accuracy.METHODS:
        right, loss = accuracy.stored("workshop", method, accuracy.GIVEN)
        assert 0 < right <= 1 and 3 < loss < 5
    assert accuracy.stored("workshop", "full", accuracy.GIVEN)[0] > 0.9
    assert accuracy.stored("workshop", "full", accuracy.GIVEN | {"documents": 99}) is None
    assert accuracy.stored("HuggingFaceTB/SmolLM2-135M", "full", accuracy.GIVEN) is None
    units = accuracy.units("real")
    assert len({unit.given["method"] for unit in units}) == len(accuracy.METHODS) and len(units) >= 12


@needs_triton
def test_attention_sets_kernels_beside_flash(bench):
    (unit,) = Gpu(dry=True, stages=("attention",)).units()
    answer, _ = measured(bench, unit)
    assert answer[0] == "done", answer[1]
    rows = {row["kernel"]: row for row in answer[1]["rows"]}
    assert {"bf16 flash", "bf16 flash, group as queries", "kvlab int8"} <= set(rows)
    flash = min(rows[name]["ms"] for name in ("bf16 flash", "bf16 flash, group as queries"))
    ours = rows["kvlab int8"]
    assert ours["speedup"] == pytest.approx(flash / ours["ms"])
    assert ours["bytes"] == 2 * 2 * 2 * 160 * (64 + 2), "K and V, 2 rows, 2 heads: codes and an fp16 scale"
    assert rows["bf16 flash"]["bytes"] == 2 * 2 * 2 * 160 * 64 * 2
    assert ours["from_flash"] < 0.02


@needs_triton
def test_kernels_are_held_against_their_definition(bench):
    from kvlab.kernels import gpu

    rows = right.kernels(bench, "fp32", small=True)
    assert {row["kernel"] for row in rows} == set(right.FORMS) | set(right.KIVIS)
    assert all(row["right"] for row in rows)
    case = right.cases("int8", "fp32", small=True)[0]

    class Wrong:
        @staticmethod
        def attend(*arguments, **more):
            return gpu.attend(*arguments, **more) * 1.001

    assert not right.compared(bench, Wrong, right.FORMS["int8"](), case, torch.float32, 1e-5, 0)["right"]

    class Unwritten:
        @staticmethod
        def attend(*arguments, **more):
            return gpu.attend(*arguments, **more) * torch.nan

    assert not right.compared(bench, Unwritten, right.FORMS["int8"](), case, torch.float32, 1e-5, 0)["right"]


def test_a_method_that_differs_from_its_cpu_self_is_not_right(bench, monkeypatch):
    monkeypatch.setitem(right.WHEN_DRY, "methods", ("full", "sinks"))
    assert all(row["right"] for row in right.methods(bench, small=True))
    plain = right.logits_of

    def off(model, *given, **more):
        return plain(model, *given, **more) + (0.01 if model.dtype == torch.bfloat16 else 0.0)

    monkeypatch.setattr(right, "logits_of", off)
    rows = right.methods(bench, small=True)
    assert all(row["right"] for row in rows), (
        "the CPU's own bf16 is as far off, so nothing is said of the device"
    )
    monkeypatch.setattr(right, "logits_of", lambda *given, **more: 1 / 0)
    rows = right.methods(bench, small=True)
    assert not any(row["right"] for row in rows) and "ZeroDivisionError" in rows[0]["error"]


def test_what_makes_a_host_wait_is_counted(bench):
    x = torch.arange(4.0)
    with right.Waits(on_gpu=False) as found:
        x.sum().item()
        x[x > 1]
        bool(x[0] > 0)
        x.tolist()
        torch.tensor([1, 2], device="cpu")
        x + 1
    assert sum(found.found.values()) == 5
    rows = {row["method"]: row for row in right.waits(bench, small=True)}
    assert set(rows) == set(right.METHODS)
    assert not [row for row in rows.values() if row["right"] is False], "no decode step waits for the device"
    assert sum(row["right"] is True for row in rows.values()) >= 14


def test_links_say_what_no_link_says(bench, monkeypatch):
    monkeypatch.setattr(right, "LINKED", ("offload", "uvm", "infinigen"))
    assert all(row["right"] for row in right.links(bench, small=True))


# Models and caches.


def test_models_have_the_published_sizes():
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        for name in models.SHAPES:
            made = AutoModelForCausalLM.from_config(models.config(name), dtype=torch.bfloat16)
            size = sum(parameter.numel() * 2 for parameter in made.parameters())
            assert models.weight_bytes(name) == pytest.approx(size, rel=0.01 if "small" not in name else 0.3)
    assert models.kv_bytes("OPT-13B", 2048, 1) == 2 * 2 * 40 * 5120 * 2048
    assert models.kv_bytes("Llama-3-8B", 1, 1) == 131072


def test_theirs_shares_the_weights_and_attends_by_itself(bench):
    ours = models.made(bench, "small-llama")
    twin = models.theirs(ours)
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in ours.parameters()}
    assert (ours.config._attn_implementation, twin.config._attn_implementation) == ("kvlab", "sdpa")


def test_hooks_of_one_method_slow_no_other_down(bench):
    plain = models.for_method(bench, "small-llama", "full")
    apart = models.for_method(bench, "small-llama", "infinigen:budget=0.1")
    assert apart is models.for_method(bench, "small-llama", "infinigen") is not plain
    assert {p.data_ptr() for p in plain.parameters()} == {p.data_ptr() for p in apart.parameters()}
    kvlab.make_cache(apart, "infinigen")
    hooks = [sum(len(block._forward_pre_hooks) for block in blocks_of(model)) for model in (plain, apart)]
    assert hooks[0] == 0 < hooks[1]


@pytest.mark.parametrize("method", ["full", "static", "static-int4", "h2o", "hf-dynamic", "hf-static"])
def test_caches_are_filled_as_a_prompt_would(bench, method):
    made = models.made(bench, "small-llama")
    run = step.Run(bench, "small-llama", models.theirs(made), method, 40, 2)
    run.step()
    held = run.cache.get_seq_length() if run.hf else run.cache.stats().tokens_seen
    assert int(held) == 41
    assert run.bytes() > 0


def test_the_fastest_of_the_same_precision_stands_beside():
    rows = {
        "full": {"eager_ms": 10.0}, "int4": {"eager_ms": 6.0}, "hf-dynamic": {"eager_ms": 8.0},
        "int2:group=32": {"eager_ms": 6.0}, "kivi2": {"eager_ms": 6.0},
        "hf-static": {"eager_ms": 5.0}, "hf-hqq": {"eager_ms": 12.0},
    }  # fmt: skip
    step.beside(rows, "eager_ms")
    assert rows["full"]["eager_times_theirs"] == 2 and rows["int4"]["eager_times_theirs"] == 0.5
    assert "eager_times_theirs" not in rows["hf-dynamic"]
    assert not {"int2:group=32", "kivi2"} & {name for name in rows if "eager_times_theirs" in rows[name]}, (
        "transformers has no cache of two bits that they could be held against"
    )
    rows[step.COMPILED] = {"best_ms": 2.0}
    rows["full"]["best_ms"] = 3.0
    step.beside(rows, "best_ms")
    assert rows["full"]["best_times_theirs"] == 1.5


def test_only_their_own_cache_is_compiled(bench, monkeypatch):
    """torch.compile would compile a step of ours anew each time (docs/gpu.md)."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled.append(model) or model)
    (unit,) = (unit for unit in step.units("real") if "compiled" in unit.name)
    given = unit.given | {"model": "small-llama", "tokens": 40}
    rows = {row["method"]: row for row in step.measure(bench, **given)["rows"]}
    assert len(compiled) == 1 and compiled[0].config._attn_implementation == "sdpa"
    assert rows[step.COMPILED]["compiled_ms"] > 0 and "compiled_ms" not in rows["static"]
    assert rows["static"]["best_times_theirs"] > 0


# Too little memory.


def test_what_does_not_fit_shrinks_and_says_to_what(bench, monkeypatch):
    monkeypatch.setattr(Bench, "free_bytes", lambda self: 10e9)
    assert bench.shrunk([8, 4, 2], lambda rows: rows * 3e9, "batch") == 2
    assert bench.said == ["batch 8 needs 24.0 GB of 9.0: 2 instead"]
    with pytest.raises(MemoryError, match=r"batch 2 needs 40\.0 GB and 9\.0 GB are free"):
        bench.shrunk([4, 2], lambda rows: rows * 20e9, "batch")


def test_throughput_goes_to_the_end_of_memory(bench, monkeypatch):
    plain = throughput.at_batch

    def at_batch(*given):
        if given[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return plain(*given)

    monkeypatch.setattr(throughput, "at_batch", at_batch)
    given = {"model": "small-opt", "method": "static", "prompt": 16, "new": 16, "largest": 64}
    found = throughput.measure(bench, **given)
    assert [row["batch"] for row in found["rows"]] == [1, 2, 3] and found["end"] == "memory"
    assert sum(row.get("best", False) for row in found["rows"]) == 1
    assert "batch 4 is too large" in bench.said[-1]


def test_memory_errors_are_known():
    assert out_of_memory(torch.OutOfMemoryError("x")) and out_of_memory(MemoryError("x"))
    assert out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_machine_without_pinned_memory_is_one_line(bench, monkeypatch):
    def refuse(*given, **more):
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr("eval.gpu.link.pinned", refuse)
    answer, _ = measured(bench, Unit("link", "copies", FIRST, 1, {"what": "copies", "sizes": [4096]}))
    assert answer[0] == "failed"
    line, traceback = answer[1]
    assert line == "RuntimeError: CUDA error: operation not supported" and "in refuse" in traceback


def test_a_method_that_fails_leaves_the_others(bench, monkeypatch):
    plain = kvlab.make_cache

    def make(model, spec):
        if spec.name == "h2o":
            raise RuntimeError("no kernel image is available")
        return plain(model, spec)

    monkeypatch.setattr(kvlab, "make_cache", make)
    found = step.measure(bench, "small-llama", 32, 1, ["full", "h2o"])
    rows = {row["method"]: row for row in found["rows"]}
    assert "no kernel image" in rows["h2o"]["left_out"] and rows["full"]["eager_ms"] > 0
