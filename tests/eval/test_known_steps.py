"""Known tokens in one pass are what one decode step for each of them is: scores and bytes."""

import functools

import pytest
import torch

import kvlab
from eval.accuracy.agreement import measure
from eval.accuracy.batching import steps_at_once, until_rows_end
from eval.accuracy.continuing import continuations
from eval.accuracy.scoring import Scorer
from eval.accuracy.windows import windows
from tests.tiny import LESS, SAME, begun, tiny

AT_ONCE = ["full", "static:length=64", "int8", "int4", "fp8", "snapkv:budget=6,window=2"]
STEP_BY_STEP = [
    "h2o:budget=6", "sinks:budget=6", "tova:budget=6", "topk:budget=6", "infinigen", "kivi2:group=4,recent=4",
    "paged", "offload", "int4:sinks=2",
]  # fmt: skip
HELD = "h2o:budget=6"  # which evicts at every step, unless what follows is held on top


def after_prefill(model, method):
    cache = begun(model, method, torch.randint(0, 96, (2, 12))).cache
    return cache


def test_which_methods_take_known_tokens_at_once():
    model = tiny("llama")
    for method in AT_ONCE:
        assert steps_at_once(after_prefill(model, method)), method
    for method in STEP_BY_STEP:
        assert not steps_at_once(after_prefill(model, method)), method
    held = after_prefill(model, HELD)
    held.hold()
    assert steps_at_once(held)
    assert not steps_at_once(
        after_prefill(tiny("mistral", sliding_window=6), "full")
    )  # a window leaves tokens behind
    assert not steps_at_once(kvlab.make_cache(model, "full"))  # nothing has been prefilled
    assert not steps_at_once(kvlab.make_cache(model, "recompute"))


@pytest.mark.parametrize("method", sorted(SAME | LESS))
def test_of_every_method_a_pass_is_its_steps(method):
    """In fp64, so that rounding of another batch shape moves no code."""
    model = tiny("llama", dtype=torch.float64)
    torch.manual_seed(0)
    ids = torch.randint(0, 96, (2, 30))
    for spec in filter(None, (SAME.get(method), LESS.get(method))):
        for held in (False, True):
            logits = []
            for parts in ((24, 6), (24, 1, 1, 1, 1, 1, 1)):
                cache = kvlab.make_cache(model, spec)
                stepper = kvlab.Stepper(model, cache)
                first, *rest = ids.split(parts, 1)
                stepper.feed(first)
                if held:
                    cache.hold()
                if not steps_at_once(cache):
                    break
                logits.append(torch.cat([stepper.feed(part) for part in rest], 1))
            if len(logits) == 2:
                assert torch.allclose(*logits, atol=1e-4), (spec, held)


CASES = [(method, "choices") for method in [*AT_ONCE, HELD]] + [(method, "windows") for method in AT_ONCE]


@pytest.mark.parametrize("method, kind", CASES)
def test_scores_and_bytes_are_those_of_single_steps(method, kind, monkeypatch):
    """Answers, or windows, of many lengths, whose rows leave when they have ended or stay in every pass; and
    bytes where all are of one length, since a step may count rows that have ended. In fp64 passes of other
    shapes round to the same codes."""
    model = tiny("llama", dtype=torch.float64)

    def scored(cost: int, at_once: bool = True, lengths=(9, 13, 30, 40), ends=(1, 2, 5, 17)):
        texts = [torch.randint(0, 96, (n,), generator=torch.manual_seed(n)).tolist() for n in lengths]
        scorer = Scorer(model, {method: kvlab.make_cache(model, method)}, 16, 100, evict="once")
        with monkeypatch.context() as patch:
            patch.setattr("eval.accuracy.batching.PASS", cost)
            patch.setattr("eval.accuracy.scoring.pack", lambda items, *_, **__: [items])  # the same prefill
            if not at_once:
                patch.setattr(Scorer, "at_once", staticmethod(lambda *_: False))
            rows = counting(model, patch)
            if kind == "choices":
                groups = [(ids, [[*range(at, at + n)] for at, n in enumerate(ends)]) for ids in texts]
                answers = [one for group in continuations(scorer, groups)[method] for one in group]
            else:
                answers = windows(scorer, [(ids, [*ids[5:], 7]) for ids in texts], 0.5)[method]
        meter = scorer.meters[method]
        return answers, meter.means() | {"scored": meter.scored or 0.0}, rows

    (leave, weighed, fewer), (stay, expected, alike), (single, _, _) = (
        scored(0), scored(10**9), scored(0, at_once=False)
    )  # fmt: skip
    for one, same, other in zip(leave, stay, single, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]
        assert one[0] == pytest.approx(same[0], abs=1e-4) and one[1] == same[1]
    assert weighed == pytest.approx(expected, rel=1e-6)
    lengths = (12, 14, 20) if kind == "choices" else (12, 12)
    alone, together = (scored(0, way, lengths, (6, 6, 6))[1] for way in (False, True))
    assert together == pytest.approx(alone, rel=1e-6)
    assert len(fewer) > len(alike) and fewer[-1] < alike[-1], "rows left"


def counting(model, monkeypatch) -> list[int]:
    """Rows of every pass through the model from now on."""
    rows, forward = [], model.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        rows.append(len(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    return rows


def test_rows_that_end_early_leave():
    """Where half of the rows have ended, if that saves more than a pass costs; else where all have."""
    steps = torch.tensor([2, 9, 2, 100, 3])
    found = [until_rows_end(steps, 0), until_rows_end(steps, 2), until_rows_end(steps[steps > 3], 3)]
    assert found == [3, 3, 9]
    assert until_rows_end(torch.tensor([2, 2, 12]), 0) == 12, "20 numbers of padding, fewer than a pass costs"


def test_agreement_is_the_same(monkeypatch):
    model, ids = tiny("llama"), torch.randint(0, 96, (3, 40))
    once = measure(model, ["int4"], ids, 8)["int4"]
    monkeypatch.setattr("eval.accuracy.agreement.steps_at_once", lambda cache: False)
    steps = measure(model, ["int4"], ids, 8)["int4"]
    for name, values in once["values"].items():
        assert values == pytest.approx(steps["values"][name], abs=1e-4)
    assert once["bytes"] == pytest.approx(steps["bytes"], rel=1e-6)
