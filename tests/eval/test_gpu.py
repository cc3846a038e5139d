"""`python -m eval gpu`, as far as a CPU goes: every stage in small, supervision, the pack and the page."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

import kvlab
from eval.__main__ import main
from eval.core.errors import Failed, Problem
from eval.gpu import accuracy, headline, measurement, models, pack, predict, report, right, step, throughput
from eval.gpu.bench import Bench, out_of_memory, spread
from eval.gpu.measurement import STAGES, Gpu
from eval.gpu.unit import FIRST, LAST, NEXT, Unit
from eval.gpu.worker import Worker, measured
from kvlab.models import blocks_of

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton (pip install triton), which torch's CPU build leaves out",
)


@pytest.fixture
def bench():
    return Bench(dry=True)


# The stages, in small.


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
    (row,) = accuracy.measure(bench, **given, methods=["full"])["rows"]
    assert row["right"] and row["loss"] == pytest.approx(row["loss_cpu"], rel=0.01)
    assert not accuracy.row("m", "full", (0.5, 2.0), (0.9, 2.0), 100)["right"]
    assert not accuracy.row("m", "full", (0.9, 2.1), (0.9, 2.0), 100)["right"]
    assert accuracy.row("m", "full", (0.86, 2.0), (0.9, 2.0), 100)["right"]


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
    assert {row["kernel"] for row in rows} == set(right.FORMS)
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


def test_what_makes_a_host_wait_is_counted(bench, monkeypatch):
    x = torch.arange(4.0)
    with right.Waits(on_gpu=False) as found:
        x.sum().item()
        x[x > 1]
        bool(x[0] > 0)
        x.tolist()
        torch.tensor([1, 2], device="cpu")
        x + 1
    assert sum(found.found.values()) == 5
    monkeypatch.setitem(right.WHEN_DRY, "methods", ("full", "static:length=512"))
    assert all(row["right"] for row in right.waits(bench, small=True)), (
        "a plain decode step waits for nothing"
    )


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
    run = step.Run(bench, "small-llama", models.theirs(made), method, 40, 2, compiled=False)
    run.step()
    held = run.cache.get_seq_length() if run.hf else run.cache.stats().tokens_seen
    assert int(held) == 41
    assert run.bytes() > 0


def test_the_fastest_of_the_same_precision_stands_beside():
    rows = {
        "full": {"eager_ms": 10.0}, "int4": {"eager_ms": 6.0}, "hf-dynamic": {"eager_ms": 8.0},
        "hf-static": {"eager_ms": 5.0}, "hf-hqq": {"eager_ms": 12.0},
    }  # fmt: skip
    step.beside(rows, "eager_ms")
    assert rows["full"]["eager_times_theirs"] == 2 and rows["int4"]["eager_times_theirs"] == 0.5
    assert "eager_times_theirs" not in rows["hf-dynamic"]


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


# Supervision: what the process does, and what is done when it does not.


def unit_of(name: str, **given) -> Unit:
    return Unit("link", name, FIRST, 1, {"what": "copies", "sizes": [4096]} | given)


def test_a_unit_that_fails_hangs_or_kills_its_process_is_followed_by_the_next(monkeypatch):
    """In real processes: `serve` is what runs in them."""
    worker = Worker(True, lambda line: None)
    try:
        assert worker.about()["device"] == "cpu (dry run)"
        with pytest.raises(Failed, match="not_there"):
            worker.ask(unit_of("wrong", not_there=1), 60)
        first = worker.process.pid
        assert worker.ask(unit_of("fine"), 60)["rows"]
        assert worker.process.pid == first
        os.kill(first, 9)
        with pytest.raises(Failed, match="ended by itself"):
            worker.ask(unit_of("killed"), 60)
        endless = {"model": "small-opt", "prompt": 8, "new": 8, "method": "static", "largest": 2**40}
        begun = time.monotonic()
        with pytest.raises(Failed, match="longer than 20 s and was ended"):
            worker.ask(Unit("throughput", "endless", FIRST, 1, endless), 20)
        assert time.monotonic() - begun < 120
    finally:
        worker.stop()
    assert not [child for child in multiprocessing.active_children() if "serve" in repr(child)]


class Scripted:
    """A worker that answers by a list, without a process."""

    def __init__(self, answers: dict, seconds: float = 0.0):
        self.answers, self.asked, self.seconds = answers, [], seconds

    def about(self) -> dict:
        return {"device": "card", "versions": {"triton": None}, "missing": ["hqq is not there"]}

    def ask(self, unit, seconds):
        self.asked.append(unit.name)
        answer = self.answers.get(unit.name, {"rows": [{"ms": 1.0}], "line": "fine", "notes": []})
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        pass


def run(monkeypatch, capfd, tmp_path, answers=(), *words: str, units=None):
    """The command with scripted units: (exit code, what was asked, gpu.json, what was said)."""
    worker = Scripted(dict(answers))
    monkeypatch.setattr(measurement, "Worker", lambda dry, say: worker)
    if units is not None:
        monkeypatch.setattr(Gpu, "units", lambda self: sorted(units, key=lambda unit: unit.rank))
    code = main(["gpu", "--dry", "--out", str(tmp_path / "out"), *words])
    file = tmp_path / "out" / "gpu.json"
    return (
        code,
        worker.asked,
        json.loads(file.read_text()) if file.is_file() else None,
        capfd.readouterr().err,
    )


PLAN = [
    Unit("right", "nice", LAST, 1), Unit("right", "a", FIRST, 1), Unit("link", "b", FIRST, 1),
    Unit("link", "c", NEXT, 1), Unit("right", "d", NEXT, 1),
]  # fmt: skip


def test_the_best_comes_first_and_everything_is_written_as_it_comes(monkeypatch, capfd, tmp_path):
    code, asked, found, said = run(monkeypatch, capfd, tmp_path, units=PLAN)
    assert code == 0 and asked == ["a", "b", "c", "d", "nice"]
    assert list(found["units"]) == ["right:a", "link:b", "link:c", "right:d", "right:nice"]
    assert found["failed"] == found["left_out"] == [] and found["machine"]["device"] == "card"
    assert "hqq is not there" in said and "1/5 right:a: fine" in said
    assert run(monkeypatch, capfd, tmp_path, units=PLAN)[1] == [], "everything is kept"


def test_a_failure_is_one_line_its_traceback_is_kept_and_it_is_tried_again(monkeypatch, capfd, tmp_path):
    wrong = {"b": Failed("RuntimeError: CUDA error: an illegal memory access", "Traceback ...\nwhole")}
    code, asked, found, said = run(monkeypatch, capfd, tmp_path, wrong, units=PLAN)
    assert code == 1 and asked == ["a", "b", "c", "d", "nice"]
    assert found["failed"] == [
        {"task": "gpu:link:b", "line": "RuntimeError: CUDA error: an illegal memory access",
         "traceback": "Traceback ...\nwhole"}
    ]  # fmt: skip
    assert "failed: link:b: RuntimeError: CUDA error" in said and "whole" not in said
    assert run(monkeypatch, capfd, tmp_path, units=PLAN)[1] == ["b"]


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(monkeypatch, capfd, tmp_path):
    code, asked, found, said = run(monkeypatch, capfd, tmp_path, {"c": KeyboardInterrupt()}, units=PLAN)
    assert code == 130 and asked == ["a", "b", "c"] and "interrupted: 2 finished cells are kept" in said
    assert list(found["units"]) == ["right:a", "link:b"]
    assert run(monkeypatch, capfd, tmp_path, units=PLAN)[1] == ["c", "d", "nice"]


def test_time_that_is_up_leaves_out_what_is_left_and_says_so(monkeypatch, capfd, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(measurement.time, "monotonic", lambda: clock[0])

    def ask(self, unit, seconds):
        self.asked.append(unit.name)
        clock[0] += 25.0
        return {"rows": [], "line": "", "notes": []}

    monkeypatch.setattr(Scripted, "ask", ask)
    code, asked, found, said = run(monkeypatch, capfd, tmp_path, (), "--minutes", "1", units=PLAN)
    assert code == 0 and asked == ["a", "b", "c"]
    assert found["left_out"] == ["right:d", "right:nice"]
    assert "2 units were left out for want of time: right:d, right:nice" in said


@pytest.mark.parametrize(
    "words, said",
    [
        (["--stages", "wrong"], "--stages wrong: expected one of right, attention"),
        (["--minutes", "0"], "'0' is not a number of minutes above 0"),
        (["--minutes", "soon"], "'soon' is not a number of minutes above 0"),
        (["--stages", "link"], "finds no CUDA device here; --dry tries every stage on the CPU"),
    ],
)
def test_bad_input_is_one_line(capfd, tmp_path, words, said):
    if "CUDA" in said and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["gpu", "--out", str(tmp_path / "out"), *words]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]


def test_every_stage_has_units_of_both_sizes_and_what_goals_hang_on_fits_into_the_time():
    for size in ("real", "dry"):
        for stage in STAGES:
            found = importlib.import_module(f"eval.gpu.{stage}").units(size)
            assert found and len({unit.name for unit in found}) == len(found)
            assert all(unit.stage == stage for unit in found) and any(unit.rank == FIRST for unit in found)
            json.dumps([unit.given for unit in found])
    first = [unit.seconds for unit in Gpu().units() if unit.rank == FIRST]
    assert sum(first) < 60 * measurement.MINUTES - 60


# The pack.


def test_a_pack_runs_elsewhere(tmp_path, monkeypatch):
    """Unpacked and started in an empty folder, with nothing of this checkout on the path."""

    def fetched(name, into, machine_code):
        raise Problem("no network in tests")

    monkeypatch.setattr(pack, "fetched", fetched)
    folder = tmp_path / "pack"
    said = pack.pack(folder, kernels=False)
    assert "transformers: not packed: no network in tests" in said
    assert pack.size_of(folder) < pack.LIMIT and said[-1].endswith("there: bash pack/run")
    (wheel,) = (folder / "site").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"kvlab/kernels/gpu.py", "eval/gpu/right.py", "eval/tasks/corpus.py"} <= set(names)
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]
    away = tmp_path / "away"
    away.mkdir()
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHON": sys.executable}
    words = ["bash", str(folder / "run"), "--dry", "--stages", "link"]
    done = subprocess.run(words, cwd=away, env=plain, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((away / "gpu-results" / "gpu.json").read_text())
    assert list(found["units"]) == ["link:copies", "link:overlap", "link:rows"]
    assert found["machine"]["commit"] == (folder / "commit.txt").read_text().strip()
    without = plain | {"PYTHON": "/usr/bin/env python-that-is-not-there"}
    assert subprocess.run(words, cwd=away, env=without, capture_output=True).returncode == 2


def test_a_pack_overwrites_nothing_but_a_pack(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "fetched", lambda *given: None)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(Problem, match="is not empty and no pack"):
        pack.pack(tmp_path, kernels=False)
    assert (tmp_path / "mine.txt").is_file()
    made = tmp_path / "pack"
    pack.pack(made, kernels=False)
    pack.pack(made, kernels=False)


def test_packed_kernels_are_found_where_they_are_unpacked(tmp_path):
    """Triton's lists of files hold whole paths, which are another machine's."""
    place = tmp_path / "pack" / "triton" / "ABC"
    place.mkdir(parents=True)
    (tmp_path / "pack" / "site").mkdir()
    for name in ("_attend.cubin", "_attend.json"):
        (place / name).write_text("{}")
    (place / "__grp___attend.json").write_text('{"child_paths": {"_attend.cubin": "/gone/_attend.cubin"}}')
    (tmp_path / "pack" / "modules.txt").write_text("")
    (tmp_path / "pack" / "ready.py").write_text(pack.READY)
    words = [sys.executable, str(tmp_path / "pack" / "ready.py"), str(tmp_path / "pack"), str(tmp_path / "s")]
    (tmp_path / "s").mkdir()
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    there = tmp_path / "s" / "triton" / "ABC"
    found = json.loads((there / "__grp___attend.json").read_text())["child_paths"]
    assert found == {name: str(there / name) for name in ("_attend.cubin", "_attend.json")}


# The page.


def example() -> dict:
    """A gpu.json with a row of every kind, of a machine that does not exist."""
    ms = {"ms": 0.05, "ms_low": 0.04, "ms_high": 0.06}
    eager = {f"eager_{key}": value for key, value in ms.items()}
    kernel = {"shape": "Llama-3-8B", "tokens": 65536, "batch": 1, **ms, **eager, "gbps": 2500.0, "bytes": 1}
    bar = {
        "system": "infinigen", "prompt": 1920, "batch": 8, "link": "throttled", "prefill_s": 0.8,
        "step_ms": 100.0, "step_ms_low": 99.0, "step_ms_high": 101.0, "total_s": 13.6, "faster": 5.5,
        "of_ideal": 4.5, "predicted": {"step_ms": 118.0}, "error": 18.0,
        "block": dict.fromkeys(headline.PARTS, 1.0),
    }  # fmt: skip
    token = {"model": "Llama-3-8B", "tokens": 8192, "batch": 1, "peak_bytes": 10**9, **eager}
    rows = {
        "right:kernels": [{"kernel": "int8", "right": True}, {"kernel": "int4", "right": False}],
        "right:waits": [
            {"method": "full", "by_name": {}, "waits": 0, "layers": 4, "offloads": False, "right": True}
        ],
        "attention:64k": [
            kernel | {"kernel": "kvlab int8", "fraction": 0.75, "speedup": 1.9},
            kernel | {"kernel": "kvlab int4", "fraction": 0.4, "speedup": 2.5},
        ],
        "step:Llama": [
            token | {"method": "static", "best_times_theirs": 1.02, "offloads": False},
            token | {"method": "h2o", "best_times_theirs": 1.5, "offloads": False},
            token | {"method": "topk", "best_times_theirs": 9.0, "offloads": True},
            {"model": "Llama-3-8B", "tokens": 8192, "batch": 1, "method": "hf-hqq", "left_out": "no hqq"},
        ],
        "link:copies": [{"copy": "to device", "size": 4096, **ms, "gbps": 20.0, "fraction": 0.5}],
        "headline:2048": [bar],
        "throughput:h2o": [
            {"model": "OPT-6.7B", "method": "h2o", "batch": 4, "step_ms": 9.0, "tokens_per_s": 444.0,
             "bytes": 10**9}
        ],
        "accuracy:workshop": [
            {"model": "workshop", "method": "full", "answered": 1.0, "answered_cpu": 1.0, "loss": 2.0,
             "loss_cpu": 2.0, "right": True}
        ],
    }  # fmt: skip
    units = {name: {"rows": found, "notes": [], "seconds": 1.0} for name, found in rows.items()}
    about = {"device": "Card", "versions": {"torch": "2.11.0"}, "memory_bytes": 8 * 10**10, "missing": []}
    failed = [{"task": "gpu:link:rows", "line": "it took too long", "traceback": "..."}]
    return {"machine": about, "dry": False, "units": units, "failed": failed, "left_out": []}


def test_the_page_says_what_was_reached_and_sets_machines_side_by_side():
    text = report.page({"one": example(), "two": example()})
    assert text.startswith("# On a GPU\n") and "None of this has run" not in text
    line = {goal: next(row for row in text.splitlines() if goal in row) for goal in report.GOALS}
    assert line[report.GOALS[0]].count("1.9: reached") == 2
    assert line[report.GOALS[1]].count("2.5: not reached") == 2
    assert line[report.GOALS[2]].count("75 %: reached") == 2
    assert line[report.GOALS[3]].count("5.5: reached") == 2
    assert line[report.GOALS[4]].count("4.5: not reached") == 2
    assert line[report.GOALS[5]].count("not by h2o 1.50") == 2
    assert line[report.GOALS[6]].count("18 %: reached") == 2
    for head in (
        "Right",
        "Attention",
        "A whole step",
        "The link",
        "InfiniGen's experiment",
        "Throughput",
        "Accuracy",
    ):
        assert f"## {head}\n" in text
    assert "two, link:rows: it took too long" in text and "one: 2 of 3 comparisons are right" in text


def test_until_a_gpu_has_run_the_page_says_so_first():
    stored = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    if list((ROOT / "docs" / "results" / "gpu").glob("*.json")):
        assert not stored.startswith(report.NOT_YET)
    else:
        assert stored.startswith(report.NOT_YET) and "nothing on this page is" in " ".join(stored.split())
        assert stored == report.page({}), "python -m eval gpu --report"


def test_a_dry_run_is_no_machine(tmp_path):
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    file = tmp_path / "results" / "gpu" / "mine.json"
    file.write_text(json.dumps(example() | {"dry": True}))
    with pytest.raises(Problem, match="says nothing about a GPU"):
        report.write(tmp_path)
    file.write_text("{")
    with pytest.raises(Problem, match=r"mine\.json: no gpu\.json"):
        report.write(tmp_path)
    file.write_text(json.dumps(example()))
    assert report.write(tmp_path).endswith("1 machines")
    for picture in ("attention", "headline"):
        assert f"figures/gpu-mine-{picture}.png" in (tmp_path / "gpu.md").read_text()
        assert (tmp_path / "figures" / f"gpu-mine-{picture}.png").stat().st_size > 5000
    with pytest.raises(Problem, match="there is no folder"):
        report.write(tmp_path / "none")


def test_predictions_follow_the_link_and_the_bytes():
    rows = {(row["batch"], row["link_gbps"], row["system"]): row for row in predict.unseen()}
    slow, fast = rows[8, 16.0, "offload"], rows[8, 64.0, "offload"]
    assert slow["step_ms"] == pytest.approx(4 * fast["step_ms"], rel=0.01)
    assert rows[20, 16.0, "offload"]["step_ms"] == pytest.approx(2.5 * slow["step_ms"], rel=0.01)
    assert rows[8, 16.0, "full"]["step_ms"] == rows[8, 64.0, "full"]["step_ms"]


def test_a_spread_is_the_median_and_its_quarters():
    assert spread([5.0, 1.0, 2.0, 3.0, 100.0]) == {"ms": 3.0, "ms_low": 2.0, "ms_high": 5.0, "repeats": 5}
