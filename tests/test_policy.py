"""Policies do not change, and no state holds a tensor that it has not declared."""

import copy

import pytest
import torch
from tiny import begun, left_padded, prompt, started, tiny

import kvlab
from kvlab.keep import H2O, TOVA, Keep
from kvlab.place import Device, Fetch, Host, InfiniGen, Quest, TopK, Whole
from kvlab.store import Exact, Growing, Int, Kivi, Paged, Ragged, Static


@pytest.mark.parametrize(
    "policy",
    [H2O(), TOVA(), Int(4), Exact(), Static(9), Growing(), Kivi(), Paged(), Device(), Whole()],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_does_not_change(policy):
    for name in (*vars(policy), "learned"):
        with pytest.raises(AttributeError):
            setattr(policy, name, 1)


class Forgetful(Keep):
    """Hides what it learns."""

    def start(self, layer):
        state = super().start(layer)
        state.box, state.named = [], {}
        return state

    def score(self, layer):
        return layer.slot_positions.float()

    def observe(self, layer, received):
        layer.state.box.append(torch.zeros(3))


def test_a_tensor_that_is_not_declared_is_refused():
    state = started(Growing(Int(4)))
    with pytest.raises(TypeError, match="keeps a tensor in 'seen': declare it in per_row"):
        state.seen = torch.zeros(2)
    with pytest.raises(TypeError, match="keeps a tensor in 'seen'"):
        state.seen = {"a": [torch.zeros(2)]}
    with pytest.raises(TypeError, match="is a tensor, but a policy holds parameters"):
        type("Odd", (Keep,), {"__init__": lambda self: setattr(self, "weights", torch.ones(2))})()


@pytest.mark.parametrize("buffer", [Growing(), Growing(Int(4)), Kivi(2, 4, 4), Ragged()])
@pytest.mark.parametrize("odd", [0, 7, True, 0.5, "x", torch.float32, [1, 2, 3], (torch.ones(2, 2, 9), None)])
def test_what_is_neither_by_row_nor_by_slot_is_odd(buffer, odd):
    """In the place of anything that a state declares, whether or not a fresh one has it."""
    state = started(buffer)
    state.append(torch.ones(2, 2, 9, 8), torch.ones(2, 2, 9, 8))
    assert state.odd(2, 2, 9) is None
    for name in (*state.per_row, *state.per_slot):
        twin = copy.deepcopy(state)
        setattr(twin, name, odd)
        assert name in twin.odd(2, 2, 9)
    if isinstance(buffer, Kivi):
        state.recents_real = torch.ones(2, 1, state.filled)
        assert state.odd(2, 2, 9) == "recents_real is of torch.float32"


@pytest.mark.parametrize("kind", ["per_row", "per_slot", "shared"])
@pytest.mark.parametrize("name", ["threshold", "next", "limits", "last", "lags", "crop", "policy"])
def test_a_name_that_a_state_has_is_not_given_twice(kind, name):
    """A fork would select its rows twice."""
    keep = type("Mine", (Keep,), {kind: (name,)})
    with pytest.raises(ValueError, match=f"Mine: {kind} names '{name}', which is taken"):
        kvlab.make_cache(tiny("llama"), keep(0.5))


@pytest.mark.parametrize("base", [Fetch, TopK, Quest, InfiniGen])
def test_a_fetch_of_ones_own_keeps_what_it_declares(base):
    class Mine(base):
        per_row = ("seen",)

        def prefill(self, layer, query, keys):
            super().prefill(layer, query, keys)
            layer.state.seen = torch.tensor(layer.lengths)

    stepper = begun(tiny("llama"), {"place": Host(Mine())}, left_padded([prompt(9), prompt(5)]))
    stepper.fork(torch.tensor([1, 0, 1]))
    assert stepper.cache.layers[-1].place.fetch.seen.tolist() == [5, 9, 5]


def test_a_name_is_not_given_twice_in_one_list():
    keep = type("Mine", (H2O,), {"per_slot": (*H2O.per_slot, "received")})
    with pytest.raises(ValueError, match="Mine: per_slot names 'received', which is taken"):
        kvlab.make_cache(tiny("llama"), keep(0.5))


def test_tensors_in_a_list_by_row_are_counted():
    class Lists(TOVA):
        per_row = ("seen",)

        def forget(self, state):
            super().forget(state)
            state.seen = [torch.zeros(1000) for _ in state.limits]

    model = tiny("llama")
    found = [begun(model, keep, prompt(9, 2)).cache.stats().device_bytes for keep in (Lists(0.5), TOVA(0.5))]
    assert found[0] - found[1] == 2 * 4000 * model.config.num_hidden_layers


def test_a_tensor_that_hides_in_a_list_is_found_when_bytes_are_counted():
    model, cache = tiny("llama"), kvlab.KVCache(tiny("llama"), keep=Forgetful(0.5))
    kvlab.Stepper(model, cache).feed(prompt(9))
    with pytest.raises(TypeError, match="the state of Forgetful keeps a tensor in 'box'"):
        cache.stats()
