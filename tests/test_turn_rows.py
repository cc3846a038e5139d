"""A row with few tokens, or none, in a prompt or a later turn of its batch is what it is alone."""

import random
import threading

import pytest
import torch
from every import EVICTING, make
from fuzz.alone import bare
from tiny import prompt, refusing, tiny

import kvlab
from kvlab.keep import Keep


@pytest.mark.parametrize("spec", EVICTING)
@pytest.mark.parametrize("tokens", [0, 1])
def test_for_a_row_with_at_most_one_token_in_it_there_is_no_turn(spec, tokens):
    seed = random.randrange(10**6)
    draw, model = random.Random(seed), tiny("llama", dtype=torch.float64)
    if make(model, spec).layers[0].place.chooses:
        tokens = 0  # one alone would choose what it attends to
    sizes = [draw.randint(6, 20), *[1] * draw.randint(0, 4), draw.randint(2, 7), *[1] * 5]
    passes, found = [prompt(size, 2, seed=seed + at) for at, size in enumerate(sizes)], []
    alone = [*passes[:-6], *[passes[-6][:, -1:]] * tokens, *passes[-5:]]
    for rows, own in ((2, passes), (1, alone)):
        stepper = kvlab.Stepper(model, make(model, spec))
        for ids in own:
            if ids.shape[1] > 1 and stepper.ids is not None:
                mask = torch.ones_like(ids)
                mask[0, : ids.shape[1] - tokens] = 0
                bare(stepper, model, ids, mask)
            else:
                logits = stepper.feed(ids[:rows])[0]
        found.append(logits)
    torch.testing.assert_close(*found, atol=1e-3, rtol=0, msg=f"seed {seed}")


def test_a_keep_that_writes_in_place_chooses_once_for_each_row():
    """In a turn in which one row has a token and another several. Nobody can copy its lock."""

    class Tired(Keep):
        per_slot = ("often",)

        def observe(self, layer, received):
            new = torch.zeros_like(layer.slot_positions)
            if layer.state.often is None:
                layer.state.dice, layer.state.lock = random.Random(1), threading.Lock()
            else:
                new[..., : layer.state.often.shape[2]] = layer.state.often
            layer.state.often = new

        def score(self, layer):
            turned = layer.slot_positions + layer.state.dice.randrange(5)
            return ((layer.state.often.add_(1) + turned) % 5).float()

    model, ids, more = tiny("llama", dtype=torch.float64), prompt(12, 2), prompt(4, 2, seed=1)
    together, alone = (kvlab.Stepper(model, kvlab.KVCache(model, keep=Tired(6))) for _ in "ab")
    together.feed(ids)
    alone.feed(ids[:1])
    bare(together, model, more, torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]]))
    alone.feed(more[:1, -1:])
    for token in prompt(5, 2, seed=2).split(1, 1):
        torch.testing.assert_close(together.feed(token)[:1], alone.feed(token[:1]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", [one for one in EVICTING if " in " not in one])
def test_a_prompt_does_not_end_before_a_row_has_a_token(spec):
    """What its row may hold would be a share of nothing."""
    model, ids, more = tiny("llama", dtype=torch.float64), prompt(9, 2), prompt(12, 2, seed=1)
    mask = torch.ones_like(ids)
    mask[1] = 0
    stepper = kvlab.Stepper(model, make(model, spec))
    with refusing("row 1 has a prompt of 0 tokens"), stepper.cache.prefill():
        stepper.feed(ids, mask)
    if stepper.cache.layers[0].in_prompt:
        with pytest.raises(ValueError, match="a row holds no token at all"):
            stepper.feed(ids, mask)
    alone = kvlab.Stepper(model, make(model, spec))
    for new in (more, *prompt(4, 2, seed=2).split(1, 1)):
        torch.testing.assert_close(stepper.feed(new)[1:], alone.feed(new[1:]), atol=1e-3, rtol=0)
    cache = make(model, spec)
    with torch.no_grad(), refusing("row 1 has a prompt of 0 tokens"):
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.stats()
