"""Classes of one's own that override what compiled code does by itself: the plain code answers."""

import random

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab import faster
from kvlab.gather import in_order
from kvlab.keep import TOVA, Keep, SnapKV
from kvlab.keep.state import KeepState
from kvlab.place import Device
from kvlab.place.device import DeviceState


def last(layer, count):
    """The slots of the newest tokens, `[batch, kv_heads, n]`."""
    newest = layer.slot_positions.argsort(-1)[..., -count:]
    return in_order(torch.zeros_like(layer.slot_positions).scatter(2, newest, 1) > 0)


class Reads(DeviceState):
    def read(self, layer, query):
        slots = last(layer, 8) if query.shape[2] == 1 else None
        return (layer.store if slots is None else layer.store.pick(slots)), slots


class Writes(DeviceState):
    def write(self, layer, keys, values, real=None):
        layer.store.append(keys, values / 2, real)


class Last(Device):
    kind = Reads

    def start(self, layer):
        return self.kind(self)


class Halves(Last):
    kind = Writes


class Ranks(Keep):
    """The oldest tokens have the best score, and the newest the best rank."""

    def score(self, layer):
        return -layer.slot_positions.float()

    def ranked(self, layer):
        return layer.slot_positions.float().masked_fill(layer.slot_positions < 0, -torch.inf)


class Losses(KeepState):
    """Counts the slots that went."""

    gone = 0

    def keep_slots(self, slots):
        super().keep_slots(slots)
        self.gone += 1


class Remembers(Keep):
    """The oldest token goes, or every third time the newest but one."""

    def start(self, layer):
        return Losses(self)

    def score(self, layer):
        positions = layer.slot_positions.float()
        return -positions if layer.state.gone % 3 == 2 else positions


class Chooses(TOVA):
    def choose(self, layer):
        return last(layer, 20) if layer.slots > 20 else None


class ChoosesToo(SnapKV):
    once = False

    def choose(self, layer):
        return super().choose(layer) if layer.in_prompt else last(layer, 20) if layer.slots > 20 else None


class Counts(SnapKV):
    """After the prompt it is told of nothing."""

    observes, per_slot, last_queries, reads_queries, heard = False, (), None, True, []

    def score(self, layer):
        return -layer.slot_positions.float()

    def observe(self, layer, received):
        self.heard.append("pass")

    def note(self, layer, query):
        self.heard.append("queries")


OWN = {
    "place that reads": {"place": Last()},
    "place that writes": {"place": Halves()},
    "place beside a keep": {"place": Last(), "keep": TOVA(80)},
    "ranked": {"keep": Ranks(80)},
    "state": {"keep": Remembers(80)},
    "choose": {"keep": Chooses(80)},
    "choose, once": {"keep": ChoosesToo(80)},
    "observe, once": {"keep": Counts(80)},
}


@pytest.mark.parametrize("own", OWN)
def test_a_class_of_ones_own_is_asked_as_without_compiled_code(own, monkeypatch):
    found, rows = [], random.choice([1, 2])
    model = tiny("llama", hidden_size=64, head_dim=32, max_position_embeddings=512)
    for plain in (False, True):
        Counts.heard.clear()
        if plain:
            monkeypatch.setattr(faster, "lodger", lambda: None)
        stepper = kvlab.Stepper(model, kvlab.KVCache(model, **OWN[own]))
        logits = [stepper.feed(prompt(120, rows), last=True)]
        logits += [stepper.feed(prompt(1, rows, step), last=True) for step in range(8)]
        held = [layer.slot_positions.sort(-1).values for layer in stepper.cache.layers]
        found.append((torch.stack(logits), held, list(Counts.heard)))
    (fast, held, heard), (slow, expected, told) = found
    assert torch.allclose(fast, slow, atol=1e-4) and heard == told
    assert all(a.equal(b) for a, b in zip(held, expected, strict=True))


def test_a_choice_that_would_be_asked_once_alone_is_refused():
    class Late(SnapKV):
        def choose(self, layer):
            return None

    with pytest.raises(ValueError, match=r"^Late\.choose: SnapKV has once = True[^\n]*say in Late"):
        kvlab.KVCache(tiny("llama"), keep=Late(9))


def test_a_cache_of_ones_own_is_updated_at_every_step():
    class Mine(kvlab.KVCache):
        def update(self, keys, values, layer, *given, **more):
            return super().update(keys, values / 2 if layer == 0 else values, layer, *given, **more)

    found = []
    for how in ("compiled", "eager"):
        model, tokenizer = kvlab.load("workshop", device="cpu", engine=how)
        ids = tokenizer("The red cat Anna sleeps in the office.", return_tensors="pt").input_ids
        found.append(kvlab.decode(model, ids, Mine(model), 6).logprobs)
    assert torch.allclose(*found, atol=1e-4)
