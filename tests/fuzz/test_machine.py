"""The state machine with fixed seeds: every action meets every method."""

import pytest
import torch
from fuzz.cases import METHODS, NOT_BARE, cases
from fuzz.machine import ACTIONS, met, run, table

import kvlab
from kvlab.faster import lodger
from kvlab.finding import PROFILED
from kvlab.methods import METHODS as NAMED


@pytest.fixture(autouse=True, scope="module")
def graphs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("method", METHODS)
def test_whatever_is_done_to_a_cache_each_row_is_as_if_alone(method):
    turns = cases(method)  # until every action has met it, at least twice, and every setting once
    for seed in range(40):
        run(turns[seed % len(turns)], examples=3, steps=9, seed=seed)
        if seed and seed + 1 >= len(turns) and all(met[method, action] for action in can_meet(method)):
            return


def can_meet(method: str) -> list[str]:
    never = {"right padding", "later padding"} if method.startswith("kivi") else set()
    never |= {"turn", "save"} if method in NOT_BARE else set()
    never |= {"outlier"} if method == "padded" else set()
    return [action for action in ACTIONS if action not in never]


def goes_at_once(method: str) -> bool:
    """Whether a layer's step went in one call, where the machine drew such steps or in two drawn here."""
    case = next(one for one in cases(method) if one.kind == "fp32")
    stepper, ids = kvlab.Stepper(case.model, case.fresh()), torch.arange(2, 14)[None]
    stepper.feed(ids)
    stepper.feed(ids[:, :1])
    layer = stepper.cache.layers[0]
    made = lodger().made(layer)
    stepper.feed(ids[:, 1:2])
    return bool(met[method, "at once"]) or (made is not None and lodger().made(layer) is made)


def test_every_action_met_every_method():
    """Runs last in this file, on the counts of the tests above."""
    assert set(METHODS) == {*NAMED, *PROFILED, "composed"}
    print("\n" + table())
    if any(not any(met[method, action] for action in ACTIONS) for method in METHODS):
        pytest.skip("only some of the methods were tried")
    unmet = [(method, action) for method in METHODS for action in can_meet(method) if not met[method, action]]
    assert not unmet
    if lodger() is None:
        return
    assert all(map(goes_at_once, ("full", "static", "int8", "int4", "fp8")))
    assert all(met[method, "compiled"] for method in ("full", "int8"))
