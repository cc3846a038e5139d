"""A step through all layers in one call after which one token of every head goes: as layer by layer."""

import pytest
import torch
from fast.atonce import SHAPES, both, held, life
from tiny import prompt

import kvlab
from kvlab.fast import team
from kvlab.keep import H2O, TOVA
from kvlab.store import Float8, Int

pytestmark = pytest.mark.usefixtures("one_thread")
GOING = (
    "h2o:budget=9", "h2o:budget=9,recent=0.1", "h2o:budget=90,recent=0.3", "h2o:budget=0.9", "tova:budget=9",
    "tova:budget=90", "sinks:budget=9", "sinks:budget=90,sinks=3", "sinks:budget=2",
)  # fmt: skip


FORMS = {"alone": None, "grouped": Float8(), "of three": Int(8), "of eight": None, "wide": Int(4, group=16)}
LONG = {"max_position_embeddings": 256}


def left(cache) -> list:
    """All that is held, which tokens these are, and what is remembered of them."""
    tables = [layer.slot_positions for layer in cache.layers]
    remembered = [x for layer in cache.layers for x in layer.keep.tensors()]
    counts = [torch.tensor([layer.rows_held, layer.lengths]) for layer in cache.layers]
    return [*held(cache), *tables, *remembered, *counts]


def going(made, rows=1, steps=40):
    """Steps after which one token goes, past two closings of slots."""
    return life(made, rows, steps, 120, left, 0)


@pytest.mark.parametrize("spec, rows", [(spec, (1, 3)[i % 2]) for i, spec in enumerate(GOING)])
def test_one_token_goes_as_layer_by_layer(model, spec, rows, went, monkeypatch):
    found, expected = both(model("of three", **LONG), going(spec, rows), monkeypatch)
    assert sum(went) >= 38 and all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.parametrize(
    "shape, keep", [(shape, (H2O(70), TOVA(20))[i % 2]) for i, shape in enumerate(SHAPES)]
)
def test_one_token_goes_of_heads_of_every_width_in_every_format(model, shape, keep, went, monkeypatch):
    form = FORMS[shape]
    made = lambda fast: kvlab.KVCache(fast, keep=keep, **({"store": form} if form else {}))
    found, expected = both(model(shape, **LONG), going(made, steps=12), monkeypatch)
    assert sum(went) >= 10 and all(map(torch.equal, found, expected))


class Own(H2O):
    """Scores otherwise than the class that it is made from."""

    def score(self, layer):
        return -super().score(layer)


def test_a_keep_made_from_one_that_goes_so_is_asked(model, went):
    fast = model()
    stepper = kvlab.Stepper(fast, kvlab.KVCache(fast, keep=Own(20)))
    for seed, count in enumerate([40, 1, 1, 1]):
        stepper.feed(prompt(count, seed=seed), last=True)
    assert len(went) == 3 and not any(went)


@pytest.mark.parametrize("spec", ["h2o:budget=9", "tova:budget=90", "sinks:budget=90", "full", "int8", "fp8"])
def test_threads_change_nothing_of_what_stays_and_goes(model, spec, went, monkeypatch):
    fast = model(**LONG)

    def say(threads):
        torch.set_num_threads(1)
        stepper = kvlab.Stepper(fast, cache := kvlab.make_cache(fast, spec))
        found = [stepper.feed(prompt(120, 2), last=True)]
        torch.set_num_threads(threads)
        return found + [stepper.feed(prompt(1, 2, seed=step), last=True) for step in range(9)] + left(cache)

    alone = say(1)
    monkeypatch.setattr(team, "ALONE", -1)
    assert all(map(torch.equal, alone, say(2))) and sum(went) >= 14
