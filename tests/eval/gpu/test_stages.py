"""Every stage of `python -m eval gpu` in small, as far as a CPU goes."""

import json
from pathlib import Path

import pytest
import torch
from triton_here import needs_triton

from eval.gpu import headline, right
from eval.gpu.plan import Gpu
from eval.gpu.worker import measured

ROOT = Path(__file__).parents[3]


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


def test_the_headline_measures_every_system_on_either_link(bench):
    given = {"model": "small-opt", "prompt": 64, "batch": 2}
    found = headline.measure(bench, **given, systems=["full", "offload", "infinigen"])
    assert {(row["system"], row["link"]) for row in found["rows"]} == {
        (system, link) for system in ("full", "offload", "infinigen") for link in ("real", "throttled")
    }
    for row in found["rows"]:
        assert row["prefill_modelled"] == (row["link"] == "throttled" and row["system"] != "full")
        assert row["total_s"] == pytest.approx(row["prefill_s"] + 128 * row["ms"] / 1e3)
    by = {(row["system"], row["link"]): row for row in found["rows"]}
    assert by["infinigen", "real"]["moved_bytes"] < by["offload", "real"]["moved_bytes"]
    assert by["full", "real"]["moved_bytes"] == 0


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
