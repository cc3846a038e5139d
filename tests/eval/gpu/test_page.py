"""docs/gpu.md, made from what machines have written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from eval.core.errors import Problem
from eval.gpu import goals, headline, pictures, predict, report
from eval.gpu.bench import spread

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton (pip install triton), which torch's CPU build leaves out",
)


def example() -> dict:
    """A gpu.json with a row of every kind, of a machine that does not exist."""
    ms = {"ms": 0.05, "ms_low": 0.04, "ms_high": 0.06}
    eager = {f"eager_{key}": value for key, value in ms.items()}
    kernel = {"shape": "Llama-3-8B", "tokens": 65536, "batch": 1, **ms, **eager, "gbps": 2500.0, "bytes": 1}
    bar = {
        "system": "infinigen", "prompt": 1920, "batch": 20, "link": "throttled", "prefill_s": 0.8,
        "prefill_modelled": True, "error_total": 12.0,
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
            token | {"method": "static", "bits": 16, "best_ms": 10.2, "offloads": False},
            token | {"method": "h2o", "bits": 16, "best_ms": 15.0, "offloads": False},
            token | {"method": "topk", "bits": 16, "best_ms": 90.0, "offloads": True},
            token | {"method": "hf-static", "bits": 16, "best_ms": 12.0, "offloads": False},
            {"model": "Llama-3-8B", "tokens": 8192, "batch": 1, "method": "hf-hqq", "bits": 4,
             "left_out": "no hqq"},
        ],
        "step:Llama, compiled": [
            token | {"method": "hf-static, compiled", "bits": 16, "best_ms": 10.0, "offloads": False},
        ],
        "link:copies": [
            {"copy": "to device", "size": 4096, **ms, "gbps": 20.0, "fraction": 0.5, "of_pcie": 0.32}
        ],
        "headline:2048": [
            bar, {"system": "uvm", "prompt": 1920, "batch": 20, "left_out": "OutOfMemoryError: 90 GB"}
        ],
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
    units["headline:2048"]["notes"] = ["OPT-13B, 1920 tokens: batch 20 needs 90.0 GB of 70.0: 10 instead"]
    about = {"device": "Card", "versions": {"torch": "2.11.0"}, "memory_bytes": 8 * 10**10, "missing": []}
    failed = [{"task": "gpu:link:rows", "line": "it took too long", "traceback": "..."}]
    return {"machine": about, "dry": False, "units": units, "failed": failed, "left_out": []}


def test_the_page_says_what_was_reached_and_sets_machines_side_by_side():
    text = report.page({"one": example(), "two": example()})
    assert text.startswith("# On a GPU\n") and "None of this has run" not in text
    line = {goal: next(row for row in text.splitlines() if goal in row) for goal in goals.GOALS}
    assert line[goals.GOALS[0]].count("1.9: reached") == 2
    assert line[goals.GOALS[1]].count("2.5: not reached") == 2
    assert line[goals.GOALS[2]].count("75 %: reached") == 2
    assert line[goals.GOALS[3]].count("5.5: reached") == 2
    assert line[goals.GOALS[4]].count("4.5: not reached") == 2
    assert line[goals.GOALS[5]].count("not by h2o 1.50") == 2
    assert line[goals.GOALS[6]].count("18 %: reached") == 2
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


def cell(text: str, goal: int) -> str:
    """What the page says that one machine reached of a goal."""
    return next(row for row in text.splitlines() if goals.GOALS[goal] in row).split("|")[-2].strip()


def test_nothing_is_called_reached_that_was_not_compared():
    found = example()
    step, rows = found["units"]["step:Llama"]["rows"], found["units"]["headline:2048"]["rows"]
    del step[1]
    assert cell(report.page({"one": found}), 5) == "reached"
    del found["units"]["step:Llama, compiled"]
    step[0]["best_ms"] = 12.5
    assert cell(report.page({"one": found}), 5) == "reached"
    base = {"model": "Llama-3-8B", "tokens": 8192, "batch": 1, "offloads": False}
    step.append(base | {"method": "int4", "bits": 4, "best_ms": 1.0})
    step.append(base | {"method": "full", "bits": 16, "left_out": "OutOfMemoryError"})
    assert cell(report.page({"one": found}), 5) == "reached by the rest; nothing to compare: full, int4"
    del step[:-2]
    assert cell(report.page({"one": found}), 5) == "not measured"
    rows.append(rows[0] | {"batch": 8, "faster": 9.0, "of_ideal": 1.1})
    assert cell(report.page({"one": found}), 3) == "5.5: reached", "the paper's batch, not the best of all"
    assert cell(report.page({"one": found}), 4) == "4.5: not reached"
    del rows[0]
    assert cell(report.page({"one": found}), 3) == "9: reached at batch 8"
    rows[-1]["error_total"] = -35.0
    assert cell(report.page({"one": found}), 6) == "35 %: not reached", "a bar is a whole run too"


def test_the_page_says_what_is_modelled_and_what_is_missing():
    text = report.page({"one": example()})
    assert "`uvm` and `uvm+h2o` use no managed memory" in text and "| 0.8* |" in text
    assert "| +18 % | +12 % |" in text and "| 32% |" in text
    for line in (
        "- one, headline:2048: `uvm`: OutOfMemoryError: 90 GB",
        "- one, headline:2048: OPT-13B, 1920 tokens: batch 20 needs 90.0 GB of 70.0: 10 instead",
        "- one, step:Llama: `hf-hqq`: no hqq",
    ):
        assert line in text


def test_a_kernel_without_flash_beside_it_is_drawn_without_a_point(tmp_path):
    """Below capability 8.0 flash attention is left out, and no ratio is known."""
    found = example()
    for row in found["units"]["attention:64k"]["rows"][1:]:
        row["speedup"] = None
    assert len(pictures.drawn("old", found, tmp_path)) == 2
    found["units"]["attention:64k"]["rows"][0]["speedup"] = None
    assert len(pictures.drawn("old", found, tmp_path)) == 1


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
