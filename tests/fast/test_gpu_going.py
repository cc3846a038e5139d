"""Kernels of a step after which one token goes, against what `Replaces` does in torch; interpreted here."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny
from with_triton import MARK

import kvlab
from kvlab.fast import gpu_going
from kvlab.fast import moves as moves_of_steps
from kvlab.fast.known import NEWEST, PLACE, SUM
from kvlab.fast.moves import Replaces
from kvlab.store import Exact
from kvlab.store.growing import Packed

pytestmark = MARK
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moves(how, batch, kv_heads, slots, head_dim, empty, ties, seed):
    """Two equal moves in the middle of a text; `empty` slots of the first row stay so."""
    torch.manual_seed(seed)
    made = object.__new__(Replaces)
    buffers = [torch.randn(batch, kv_heads, slots + 3, head_dim, device=DEVICE) for _ in "kv"]
    made.used = tuple((buffer[:, :, :slots],) for buffer in buffers)
    made.buffers, made.kernel = made.used, False
    order = torch.rand(batch, kv_heads, slots, device=DEVICE).argsort(-1).int()
    made.positions = order + 5
    made.hole = order.argmax(-1, keepdim=True)
    made.positions.scatter_(2, made.hole, -1)
    made.newest = torch.full((batch,), slots + 9, dtype=torch.int32, device=DEVICE)
    made.positions[0][(order[0] < empty) & (made.positions[0] >= 0)] = -1
    made.reach = torch.tensor([slots // 3] + [2] * (batch - 1), dtype=torch.int32, device=DEVICE)
    made.first, made.slots, made.how, made.even = 7, slots, how, not empty
    made.asked = torch.ones(batch, 1, dtype=torch.bool, device=DEVICE)
    made.sums = torch.rand(batch, kv_heads, slots, device=DEVICE) if how == SUM else None
    if ties and how == SUM:
        made.sums.round_(decimals=1)
    if how == SUM:
        made.sums.masked_fill_(made.positions < 0, 0.0)
    made.store = SimpleNamespace(packed=lambda *held: Packed(*held, Exact(), Exact(), torch.float32))
    made.coded = lambda keys, values: ((keys,), (values,))
    twin = object.__new__(Replaces)
    vars(twin).update(vars(made))
    for name in ("positions", "hole", "newest", "sums"):
        setattr(twin, name, None if getattr(made, name) is None else getattr(made, name).clone())
    twin.used = tuple((buffer.clone()[:, :, :slots],) for buffer in buffers)
    twin.kernel = True
    return made, twin


@pytest.mark.parametrize("how", [SUM, NEWEST, PLACE])
@pytest.mark.parametrize(
    "batch, kv_heads, share, slots, head_dim, empty",
    [(1, 2, 4, 70, 64, 0), (2, 3, 3, 33, 80, 4), (3, 1, 1, 1100, 32, 0), (2, 2, 5, 129, 96, 7)],
)
def test_the_same_tokens_go(how, batch, kv_heads, share, slots, head_dim, empty):
    plain, by_kernel = moves(how, batch, kv_heads, slots, head_dim, empty, batch == 2, slots)
    for _ in range(4):
        query = torch.randn(batch, kv_heads * share, 1, head_dim, device=DEVICE)
        keys, values = (torch.randn(batch, kv_heads, 1, head_dim, device=DEVICE) for _ in "kv")
        outs = [move.attend(query, keys, values, head_dim**-0.5) for move in (plain, by_kernel)]
        torch.testing.assert_close(*outs, atol=2e-5, rtol=0)
        for name in ("positions", "hole", "newest"):
            assert torch.equal(getattr(plain, name), getattr(by_kernel, name)), name
        if how == SUM:
            torch.testing.assert_close(plain.sums, by_kernel.sums, atol=1e-5, rtol=0)
        for one, other in zip(plain.used, by_kernel.used, strict=True):
            assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("spec", ["h2o:budget=9", "tova:budget=12", "sinks:budget=10"])
def test_kernels_are_held_against_torch_before_they_are_used(spec, monkeypatch):
    """What the layer holds is then as it was."""
    model = tiny("llama", head_dim=16).to(DEVICE)
    cache = kvlab.make_cache(model, spec)
    stepper = kvlab.Stepper(model, cache)
    for size in (20, 1, 1):
        stepper.feed(torch.randint(2, 90, (2, size)).to(DEVICE))
    monkeypatch.setattr(moves_of_steps, "trusted", lambda *given: True)
    monkeypatch.setattr(moves_of_steps, "_agreed", {})
    layer, held = cache.attending[1], cache.attending[1].keys
    move = Replaces(layer, torch.zeros(1, dtype=torch.bool, device=DEVICE))
    assert move.kernel and list(moves_of_steps._agreed.values()) == [True]
    layer.in_order()
    assert torch.equal(layer.keys, held)
    monkeypatch.setattr(moves_of_steps, "_agreed", {})
    monkeypatch.setattr(gpu_going, "let_go", lambda move, received: None)
    with pytest.warns(UserWarning, match="do without their kernels"):
        assert not Replaces(layer, torch.zeros(1, dtype=torch.bool, device=DEVICE)).kernel
