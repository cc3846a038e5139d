"""Quest in whole models: crops, the index's bytes, rows that leave."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.attention import group_importance


@pytest.mark.parametrize("spec", ["quest:page=3,budget=0.3", "quest:page=3,budget=9,digest=centre"])
def test_a_crop_into_a_page(spec):
    """What is left is bounded again, so that a cropped cache goes on as a fresh one."""
    model, ids = tiny("llama"), prompt(46, rows=2)
    cropped, fresh = (kvlab.Stepper(model, kvlab.make_cache(model, spec)) for _ in range(2))
    cropped.feed(ids)
    cropped.cache.crop(-17)
    fresh.feed(ids[:, :29])
    for step in range(8):
        token = prompt(1, rows=2, seed=step)
        with torch.no_grad():
            ours = model(token, past_key_values=cropped.cache).logits[:, -1]
        assert torch.allclose(ours, fresh.feed(token)[:, -1], atol=1e-5)


@pytest.mark.parametrize("spec", ["quest+int8:page=3,budget=0.3", "quest:page=3,budget=0.3"])
def test_a_crop_of_keys_that_were_rounded_is_refused(spec):
    """Bounds are of keys before they were rounded, which nobody has after a crop."""
    stepper = kvlab.Stepper(model := tiny("llama"), kvlab.make_cache(model, spec))
    rounds = "+" in spec
    assert stepper.cache.is_croppable is not rounds
    stepper.feed(prompt(46))
    if rounds:
        with pytest.raises(ValueError, match="Quest has bounds of keys that the store has rounded since"):
            stepper.cache.crop(-5)
    stepper.feed(prompt(1, seed=2))
    stepper.cache.crop(-47)
    assert stepper.cache.get_seq_length() == 0


def test_the_longest_row_may_leave():
    """What stays goes on as it would by itself, though its pages were made beside more of them."""
    model, spec, ids = tiny("llama"), "quest:page=4,budget=8,full_layers=1,digest=centre", prompt(33)
    both, alone = (kvlab.Stepper(model, kvlab.make_cache(model, spec)) for _ in range(2))
    both.feed(*left_padded([ids[:, 20:], ids]))
    both.fork(torch.tensor([0]))
    alone.feed(ids[:, 20:])
    for token in (5, 6, 7, 8, 9):
        fed = torch.tensor([[token]])
        assert torch.allclose(both.feed(fed, last=True), alone.feed(fed, last=True), atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_a_page_whose_weight_is_0_comes_before_none(heads):
    """Bounds may be hundreds of nats apart, and a weight of fp32 is then 0."""
    for seed in range(20):
        scores = torch.randn(2, heads, 9, generator=torch.Generator().manual_seed(seed)) * 400
        real = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(seed)) < 0.5
        real[..., 0] = True
        found = group_importance(scores.masked_fill(~real, -torch.inf), 1)
        assert ((found > -torch.inf) == real).all()
