"""On a GPU a token that cannot be stored is refused when the next one comes; here the device is pretended."""

import pytest
import torch
from tiny import prompt, tiny

from kvlab import late
from kvlab.store import Float8, Growing, Int, Kivi


class Shape:
    head_dim = value_dim = 8


class Layer:
    shape, local = Shape, None


def one(value: float, head: int = 1):
    """K and V of one token, `[1, 2, 1, 8]`; a head's first channel holds the value."""
    x = torch.ones(1, 2, 1, 8)
    x[0, head, 0, 0] = value
    return x


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(late, "far", lambda x: True)


STORES = [Growing(Int(8)), Growing(Int(4, scale="fp32")), Growing(Float8()), Kivi(2, group=8, recent=4)]


@pytest.mark.parametrize("policy", STORES, ids=["int8", "int4", "fp8", "kivi"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_token_is_refused_with_the_next_one(far, policy, bad):
    store = policy.start(Layer)
    good = torch.ones(1, 2, 5, 8)
    store.append(good, good)
    store.append(one(2.0), one(bad))
    with pytest.raises(ValueError, match=r"values: .*KV head 1 holds NaN or infinity"):
        store.append(one(2.0), one(2.0))


def test_a_prompt_is_refused_at_once_and_so_is_a_token_near_by(far, monkeypatch):
    store = Growing(Int(8)).start(Layer)
    with pytest.raises(ValueError, match="keys: int8: KV head 0 holds NaN"):
        store.append(torch.full((1, 2, 3, 8), torch.nan), torch.ones(1, 2, 3, 8))
    monkeypatch.undo()
    store = Growing(Int(8)).start(Layer)
    with pytest.raises(ValueError, match="keys: int8: KV head 1 holds NaN"):
        store.append(one(torch.nan), one(1.0))


def test_forks_and_other_layers_are_not_blamed(far):
    import copy

    store, other = (Growing(Int(8)).start(Layer) for _ in range(2))
    for one_of in (store, other):
        one_of.append(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    copy.deepcopy(store)
    store.append(one(torch.nan), one(1.0))
    other.append(one(1.0), one(1.0))
    with pytest.raises(ValueError, match="keys"):
        store.append(one(1.0), one(1.0))


@pytest.mark.parametrize("method", ["int8", "int2:group=4", "kivi2:group=4,recent=4", "fp8"])
def test_what_is_decoded_is_the_same(far, monkeypatch, method):
    import kvlab

    model, ids = tiny("llama"), prompt(12)
    late_one = kvlab.decode(model, ids, kvlab.make_cache(model, method), 8)
    monkeypatch.undo()
    at_once = kvlab.decode(model, ids, kvlab.make_cache(model, method), 8)
    assert torch.equal(late_one.logprobs, at_once.logprobs)
