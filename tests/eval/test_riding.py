"""Under `full` an answer rides in its prompt's pass: the same numbers and bytes in fewer passes."""

from itertools import chain

import pytest
import torch

import kvlab
from eval.accuracy import riding
from eval.accuracy.riding import carries, pays
from eval.accuracy.scoring import Scorer
from tests.tiny import tiny

RIDES = ["full"]
WALKS = [
    "int8", "int4", "fp8", "static:length=64", "paged", "offload", "h2o:budget=0.9",
    "snapkv:budget=40,window=2",
    "sinks:budget=40", "topk:budget=40", "infinigen", "kivi2:group=4,recent=4", "recompute",
]  # fmt: skip
GROUPS = [  # tokens of a prompt, of its answers
    (1, (1,)), (1, (3, 2)), (5, (4, 4)), (7, (1, 1, 1)), (13, (6,)), (9, (5, 7)), (31, (2, 3)), (12, (1, 5)),
]  # fmt: skip


def groups():
    torch.manual_seed(3)
    draw = lambda count: torch.randint(0, 96, (count,)).tolist()
    return [(draw(length), [draw(count) for count in counts]) for length, counts in GROUPS]


def scored(monkeypatch, rides: bool, asked, batch: int = 3, model=None, method: str = "full"):
    """(answers, mean bytes, shapes of the passes)."""
    model = model or tiny("llama", dtype=torch.float64)
    shapes = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, ids, out: shapes.append(ids[0].shape))
    monkeypatch.setattr("eval.accuracy.scoring.carries", carries if rides else lambda cache: False)
    scorer = Scorer(model, {method: kvlab.make_cache(model, method)}, batch, 100)
    found = scorer.continuations(asked)[method]
    hook.remove()
    return found, scorer.meters[method].means(), shapes


def test_only_what_holds_everything_as_it_is_rides():
    model = tiny("llama")
    assert [method for method in RIDES + WALKS if carries(kvlab.make_cache(model, method))] == RIDES
    assert not carries(kvlab.make_cache(tiny("mistral", sliding_window=6), "full"))


@pytest.mark.parametrize("heads", [80, 96, 160])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_numbers_are_those_of_answers_after_their_prompts(monkeypatch, batch, heads):
    model = tiny("llama", dtype=torch.float64, head_dim=heads)
    asked = groups()
    mine, bytes_mine, along = scored(monkeypatch, True, asked, batch, model)
    theirs, bytes_theirs, after = scored(monkeypatch, False, asked, batch, model)
    assert [len(one) for one in mine] == [len(counts) for _, counts in GROUPS]
    for one, other in zip(chain(*mine), chain(*theirs), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-9) and one[1] == other[1]
    assert bytes_mine["row_steps"] == bytes_theirs["row_steps"] and len(along) < len(after)


def test_bytes_are_those_of_single_steps_where_nothing_is_padded(monkeypatch):
    asked = [(prompt, [answer]) for prompt, (answer, *_) in [groups()[4]] * 2]
    for batch in (1, 2):
        mine, theirs = (scored(monkeypatch, rides, asked, batch)[1] for rides in (True, False))
        assert mine == pytest.approx(theirs, rel=1e-9) and mine["device_bytes"] > 0


def test_one_pass_for_each_batch_and_logits_of_answers_alone(monkeypatch):
    model, asked = tiny("llama"), [(list(range(20)), [[1, 2, 3]]), (list(range(2, 22)), [[4, 5, 6]])]
    widths = []
    model.lm_head.register_forward_hook(lambda _, given, out: widths.append(out.shape[:2]))
    *_, shapes = scored(monkeypatch, True, asked, 8, model)
    assert shapes == [(2, 22)] and widths == [(2, 3)]


def test_a_long_prompt_is_read_once_for_its_answers(monkeypatch):
    short, long = (list(range(4)), [[1, 2, 3], [4, 5, 6]]), (list(range(50)), [[1, 2, 3], [4, 5, 6]])
    assert pays(short) and not pays(long) and pays((long[0], [[1], [2], [3]]))  # which feed the same: nothing
    found, _, shapes = scored(monkeypatch, True, [long, short], 8)
    assert (2, 6) in shapes and (1, 49) in shapes and len(shapes) == 3
    assert all(answer is not None for answers in found for answer in answers)


def test_few_logits_at_a_time(monkeypatch):
    asked = groups()
    whole, _, few = scored(monkeypatch, True, asked, 64)
    monkeypatch.setattr(riding, "LOGITS", 96 * 7 * 2)
    parts, _, many = scored(monkeypatch, True, asked, 64)
    assert len(many) > len(few)
    for one, other in zip(chain(*whole), chain(*parts), strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_an_error_is_the_methods_own(monkeypatch):
    model = tiny("llama")
    scorer = Scorer(model, {"full": kvlab.make_cache(model, "full")}, 4, 100)
    monkeypatch.setattr("eval.accuracy.scoring.ride", lambda *_: 1 / 0)
    assert scorer.continuations(groups()) == {} and isinstance(scorer.errors["full"], ZeroDivisionError)


def test_logits_of_some_last_positions():
    model, ids = tiny("llama"), torch.arange(24).view(2, 12)
    whole = kvlab.Stepper(model, kvlab.make_cache(model, "full")).feed(ids)
    for chunk in (None, 5):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
        part = stepper.feed(ids, last=7, chunk=chunk)
        assert part.shape == (2, 7, 96) and torch.allclose(part, whole[:, -7:], atol=1e-4)
    with pytest.raises(ValueError, match="last=13: expected"):
        stepper.feed(ids, last=13)
