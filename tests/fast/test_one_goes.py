"""Where one token of every head goes at every step: the same tokens stay, and slots close up now and then."""

import importlib

import pytest
import torch
from fast.atonce import of
from tiny import left_padded, prompt

import kvlab
from kvlab.fast.step import PER_EMPTY
from kvlab.keep import H2O
from kvlab.store import Int

step_module = importlib.import_module("kvlab.fast.step")
KEEPS = ("h2o:budget=0.6", "h2o:budget=0.6,recent=0.1", "tova:budget=0.6", "sinks:budget=0.6",
         "h2o:budget=0.6,chunk=3")  # fmt: skip


def kept(layer) -> list:
    """The positions held by every row and head."""
    positions = layer.slot_positions
    return [[row[row >= 0].tolist() for row in head] for head in positions]


@pytest.mark.parametrize(
    "spec, rows", [(one, (1, 3)[i % 2]) for i, one in enumerate([*KEEPS, "h2o of int8"])]
)
def test_the_same_tokens_stay_and_the_logits_are_the_same(spec, rows, monkeypatch):
    model = of(max_position_embeddings=512)
    ids, mask = left_padded([prompt(250 - 7 * row, seed=row) for row in range(rows)])
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(step_module, "one_goes", lambda layer: False)
        if spec == "h2o of int8":
            cache = kvlab.KVCache(model, keep=H2O(0.6), store=Int(8))
        else:
            cache = kvlab.make_cache(model, spec)
        stepper = kvlab.Stepper(model, cache)
        logits, tokens, held = [stepper.feed(ids, mask, last=True)], [], []
        for step in range(30):
            logits.append(stepper.feed(prompt(1, rows, seed=step), last=True))
            layers = stepper.cache.attending
            tokens.append([kept(layer) for layer in layers])
            held.append([(layer.slots, layer.rows_held) for layer in layers])
        stepper.fork(torch.tensor([rows - 1, 0]))
        logits.append(stepper.feed(prompt(1, 2), last=True).flatten())
        found.append((logits, tokens, held))
    (logits, tokens, held), (right, kept_right, held_right) = found
    assert tokens == kept_right
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(logits, right, strict=True))
    for ours, plain in zip(held, held_right, strict=True):
        for (slots, rows_held), (fewest, rows_right) in zip(ours, plain, strict=True):
            assert rows_held == rows_right and 0 <= slots - max(rows_held) <= slots / PER_EMPTY
            assert slots - fewest <= slots / PER_EMPTY
    assert any(slots > max(rows_held) for step in held for slots, rows_held in step), "some stay empty"
