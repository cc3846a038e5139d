"""What the report calls noise, guessing and a front; budgets, rows and their files."""

from types import SimpleNamespace

import pytest
import stored
import torch
from scipy.stats import binomtest

import kvlab
from eval.accuracy.worker import chance
from eval.report import budgets, statistics, tables


@pytest.mark.parametrize("lost, won", [(0, 0), (6, 0), (5, 0), (12, 3), (4, 4), (1, 9)])
def test_mcnemar_is_the_exact_binomial_test(lost, won):
    ours = [0.0] * lost + [1.0] * won + [1.0] * 7
    full = [1.0] * lost + [0.0] * won + [1.0] * 7
    expected = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert statistics.mcnemar(ours, full) == (lost, won, pytest.approx(expected))
    assert statistics.differs(ours, full) == (expected < 0.05)  # six lost answers are more than noise


def test_parts_of_an_answer_are_no_matter_for_mcnemar():
    assert statistics.mcnemar([0.25, 1.0], [1.0, 1.0]) is None
    assert statistics.differs([0.25, 0.5] * 20, [1.0, 1.0] * 20)


def test_the_front_is_what_nothing_beats():
    points = [(50, 90), (20, 40), (20, 60), (30, 55), (100, 90), (10, 10)]
    assert budgets.front(points) == [(10, 10), (20, 60), (50, 90)]


def cell(method, right, count=40, task="recall", **more):
    device = 1e6 if method == "full" else 2e5
    about = {
        "bytes": {"device_bytes": device, "host_bytes": 0.0, "moved_bytes": 0.0, "row_steps": 9},
        "config": {"protocol": "context-first", "evict": "once", "limit": None, "dtype": None,
                   "num_fewshot": None, "model": "a1", "code": "c1", "method": None, "task": None},
    }  # fmt: skip
    about |= {"chance": 0.25, "value_bytes": 4, "commit": "abc"}
    return stored.cell(method, task, [1.0] * right + [0.0] * (count - right), **about | more)


def test_where_full_guesses_no_method_is_compared(tmp_path):
    cells = [cell("full", 12), cell("h2o:budget=0.2", 0), cell("int4", 3)]
    printed, page, told, _ = stored.reported(stored.store_of(tmp_path, cells))
    words = "which does not beat guessing (25.0 %) by two standard errors; no method is compared there"
    assert words in printed and words in page
    assert "*" not in printed.partition("Per cent")[0] and "▲" not in printed.partition("Per cent")[0]
    assert {row["compared"] for row in told} == {"False"} and {row["differs"] for row in told} == {""}
    (board,) = tables.boards(cells)
    assert board.at_chance == ["recall"] and board.mean == {}


def test_curves_rows_and_floor(tmp_path):
    floor = {"metric": "acc", "value": 0.5, "stderr": 0.08, "n": 40, "higher_is_better": True}
    cells = [cell("full", 38, floor=floor), cell("int4", 37)]
    cells += [cell(f"h2o:budget={b}", n, scored=0.4) for b, n in ((0.1, 5), (0.4, 30))]
    printed, page, told, paths = stored.reported(stored.store_of(tmp_path, cells))
    assert tmp_path / "budgets.svg" in paths and "budget by budget" in page
    assert "full without any shots, the floor, answers 50.0 ± 8.0 %" in printed
    assert "chosen by a rule more than by the method's own score: h2o:budget=0.1 (40 %)" in printed
    found = {row["method"]: row for row in told}
    assert found["h2o:budget=0.1"]["lost"] == "33" and found["h2o:budget=0.1"]["differs"] == "True"
    assert found["int4"]["differs"] == "False" and found["int4"]["device_bytes_of_full"] == "0.2"
    import pyarrow.parquet

    packed = pyarrow.parquet.read_table(tmp_path / "accuracy.parquet").to_pylist()
    assert [row["method"] for row in packed] == [row["method"] for row in told]
    assert packed[0]["model_digest"] == "a1" and packed[0]["code_digest"] == "c1"


@pytest.mark.parametrize("protocol", ["many-questions", "reuse"])
def test_what_a_context_costs_stands_beside_the_bytes(tmp_path, protocol):
    """Of cells that count their contexts; one of before shows dashes. Elsewhere there are no such columns."""
    counted = {"contexts": 10, "prefilled_tokens": 1230, "prefill_seconds": 2.0}
    config = cell("full", 38)["config"] | {"protocol": protocol}
    cells = [cell("full", 38, config=config, **counted), cell("h2o:budget=0.2", 5, config=config)]
    printed, page, told, _ = stored.reported(stored.store_of(tmp_path / "it", cells))
    costs = [line.split() for line in printed.partition("contexts")[2].splitlines() if line.strip()]
    found = {line[0]: line[-3:] for line in costs}
    assert found["full"] == ["10", "123", "0.3"] and found["h2o:budget=0.2"] == ["–"] * 3
    assert "prefilled per context" in page and "<td>123</td>" in page
    assert told[0]["contexts"] == "10" and told[1]["prefilled_tokens"] == ""
    printed, page, *_ = stored.reported(stored.store_of(tmp_path / "other", [cell("full", 38, **counted)]))
    assert "contexts" not in printed and "prefilled per context" not in page


@pytest.mark.parametrize("method, share", [
    ("sinks:budget=20", 0.0), ("h2o:budget=20", 0.5), ("snapkv:budget=20", 0.2), ("tova:budget=20", 0.95),
    ("kvzip:budget=20,over=head", 0.75), ("adakv:budget=20", 0.2),
    ("expected:budget=20", 0.75), ("lagkv:budget=20,lag=30", 0.0), ("lagkv:budget=20,lag=8", 0.4),
    ("full", None), ("h2o:budget=1", None), ("topk", None),
])  # fmt: skip
def test_the_share_that_a_score_chose(method, share):
    model, _ = kvlab.load()
    cache = kvlab.make_cache(model, method)
    kvlab.Stepper(model, cache).feed(torch.arange(60)[None], last=True)
    assert cache.stats().scored == (None if share is None else pytest.approx(share))
    cache.reset()
    assert cache.stats().scored is None


@pytest.mark.parametrize("value, stderr, floor, above", [
    (0.30, 0.05, 0.25, False), (0.36, 0.05, 0.25, True), (0.0, 0.0, 0.0, False), (0.5, None, None, True),
])  # fmt: skip
def test_guessing_is_beaten_by_two_standard_errors_or_not(value, stderr, floor, above):
    assert statistics.beats(value, stderr, floor) == above


def test_guessing_is_defined_task_by_task():
    written = SimpleNamespace(OUTPUT_TYPE="generate_until", config=SimpleNamespace(metadata={"chance": 0.25}))
    rolling = SimpleNamespace(OUTPUT_TYPE="loglikelihood_rolling", config=SimpleNamespace(metadata=None))
    assert chance(None, [2, 4]) == 0.375
    assert chance(written, []) == 0.25 and chance(rolling, []) is None
    written.config.metadata = None
    assert chance(written, []) == 0.0
    told = SimpleNamespace(OUTPUT_TYPE="loglikelihood", config=SimpleNamespace(metadata=None))
    assert chance(told, []) == 0.0
