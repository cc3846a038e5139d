"""docs/gpu.md, whose tables are made from what machines have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.core.errors import Problem
from eval.gpu import page, predict
from eval.gpu.bench import spread

ROOT = Path(__file__).parents[3]
EMPTY = "".join(f"<!-- gpu: {name} -->\n<!-- end of gpu -->\n" for name in ("goals", "predicted", "measured"))


def example() -> dict:
    """A gpu.json with a row of every kind, of a machine that does not exist."""
    ms = {"ms": 0.05, "ms_low": 0.04, "ms_high": 0.06}
    kernel = {"shape": "Llama-3-8B", "tokens": 65536, "batch": 1, **ms, "gbps": 2500.0, "bytes": 1}
    bar = {
        "prompt": 1920, "batch": 20, "link": "real", "prefill_s": 0.8, "ms_low": 99.0, "ms_high": 101.0,
        "predicted_ms": 118.0, "error": 18.0, "error_total": 12.0, "moved_bytes": 0,
    }  # fmt: skip
    token = {"model": "Llama-3-8B", "tokens": 8192, "batch": 1, "ms_low": 1.0, "ms_high": 99.0, "bits": 16}
    token |= {"way": "eager", "offloads": False}
    rows = {
        "right:kernels": [{"kernel": "int8", "right": True}, {"kernel": "int4", "right": False}],
        "right:kernels 2": [
            {"kernel": "kivi2", "dtype": dtype, "tokens": 40000, "error": error, "right": True}
            for dtype, error in (("bf16", 0.0111), ("fp16", 0.0004))
        ],
        "right:links": [{"method": "offload", "right": True}],
        "attention:64k": [
            kernel | {"kernel": "kvlab int8", "fraction": 0.75, "speedup": 1.9},
            kernel | {"kernel": "kvlab int4", "fraction": 0.4, "speedup": 2.5},
        ],
        "step:eager 1": [token | {"method": "static", "ms": 10.2}, token | {"method": "h2o", "ms": 15.0}],
        "step:eager 2": [
            token | {"method": "topk", "ms": 90.0, "offloads": True},
            token | {"method": "hf-static", "ms": 12.0},
        ],
        "step:graph 1": [
            token | {"method": method, "ms": ms, "way": "graph"}
            for method, ms in (("hf-static", 12.0), ("static", 10.0), ("int8", 7.0))
        ],
        "link:copies": [{"what": "to device", "bytes": 4096, **ms, "gbps": 20.0, "fraction": 0.5}],
        "headline:1920": [
            bar | {"system": "infinigen", "ms": 100.0, "total_s": 13.6},
            bar | {"system": "full", "ms": 50.0, "total_s": 6.0},
        ],
        "headline:1920, the others": [
            bar | {"system": "offload", "ms": 500.0, "total_s": 74.8, "moved_bytes": 9e9},
            {"system": "uvm", "prompt": 1920, "batch": 20, "left_out": "OutOfMemoryError: 90 GB"},
        ],
    }  # fmt: skip
    units = {name: {"rows": found, "notes": [], "seconds": 1.0} for name, found in rows.items()}
    about = {"device": "Card", "versions": {"torch": "2.11.0"}, "memory_bytes": 8 * 10**10}
    failed = [{"task": "gpu:link:overlap", "line": "it took too long", "traceback": "..."}]
    return {"machine": about, "dry": False, "units": units, "failed": failed, "left_out": ["right:methods 1"]}


def cell(text: str, goal: int) -> str:
    """What the page says that one machine reached of a goal."""
    return next(row for row in text.splitlines() if page.GOALS[goal] in row).split("|")[-2].strip()


def test_nothing_is_called_reached_that_was_not_compared():
    found = example()
    units = found["units"]

    def said(goal: int) -> str:
        return cell(page.filled(EMPTY, {"one": found}), goal)

    units["step:graph 1"]["rows"] = [
        units["step:graph 1"]["rows"][0] | {"method": name, "ms": limit}
        for name, limit in page.LIMITS.items()
    ]
    assert said(4) == "reached"
    del units["step:graph 1"]["rows"][:2]
    assert said(4) == "reached by the rest; not measured: static, full"
    del units["step:graph 1"]
    assert said(4) == "not measured"
    ours = units["step:eager 1"]["rows"]
    del ours[1]
    assert said(5) == "reached"
    del units["step:eager 2"]
    assert said(5) == "not measured"
    bars = units["headline:1920"]["rows"]
    bars.append(bars[0] | {"batch": 8})
    assert said(7) == "5.5: reached", "the paper's batch, not the last one"
    del units["link:copies"]
    assert said(6) == "not measured" and said(7) == "5.5: not reached", "a slow FlexGen is no baseline"
    bars[0]["error_total"] = -35.0
    assert said(9) == "35 %: not reached", "a bar is a whole run too"


def test_the_page_is_as_it_is_written():
    stored = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    machines = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / "docs" / "results" / "gpu").glob("*.json"))
    }
    assert stored == page.filled(stored, machines), "python -m eval gpu --report"


def test_a_dry_run_is_no_machine(tmp_path):
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    (tmp_path / "gpu.md").write_text(EMPTY)
    file = tmp_path / "results" / "gpu" / "mine.json"
    file.write_text(json.dumps(example() | {"dry": True}))
    with pytest.raises(Problem, match="says nothing about a GPU"):
        page.write(tmp_path)
    file.write_text("{")
    with pytest.raises(Problem, match=r"mine\.json: no gpu\.json"):
        page.write(tmp_path)
    file.write_text(json.dumps(example()))
    assert (
        page.write(tmp_path).endswith("1 machines") and "### mine: Card" in (tmp_path / "gpu.md").read_text()
    )
    with pytest.raises(Problem, match="there is no "):
        page.write(tmp_path / "none")


def test_predictions_follow_the_link_and_the_bytes():
    rows = {(row["batch"], row["link_gbps"], row["system"]): row for row in predict.unseen()}
    slow, fast = rows[8, 16.0, "offload"], rows[8, 64.0, "offload"]
    assert slow["step_ms"] == pytest.approx(4 * fast["step_ms"], rel=0.01)
    assert rows[20, 16.0, "offload"]["step_ms"] == pytest.approx(2.5 * slow["step_ms"], rel=0.01)
    assert rows[8, 16.0, "full"]["step_ms"] == rows[8, 64.0, "full"]["step_ms"]


def test_a_spread_is_the_median_and_its_quarters():
    assert spread([5.0, 1.0, 2.0, 3.0, 100.0]) == {"ms": 3.0, "ms_low": 2.0, "ms_high": 5.0, "repeats": 5}
