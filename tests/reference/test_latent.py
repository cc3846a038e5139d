"""Multi-head latent attention in both ways: equal, on a tiny DeepSeek and by definition; what they cost."""

import pytest
import torch
from families.models import family
from reference.definitions import latent
from tiny import prompt
from torch.utils.flop_counter import FlopCounterMode

import kvlab
from kvlab.arithmetic import latent_step


def attending(name):
    """(an attention module, what it attended with at the last of a few steps) of a tiny model."""
    model, calls = kvlab.prepare(family(name)), {}
    cache = kvlab.make_cache(model, "full")
    layer = cache.layers[1]
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(19, rows=2))
    original = type(layer)._attend

    def noted(self, given):
        out = original(self, given)
        if self is layer:
            calls["given"], calls["out"] = given, out
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "_attend", noted)
        stepper.feed(prompt(1, rows=2, seed=1))
    latents, rotary = layer.store.read(torch.device("cpu"))
    return layer._attention(), calls["given"], calls["out"], latents, rotary


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3"])
@torch.no_grad()
def test_both_ways_are_the_models_own_attention(name):
    module, given, out, latents, rotary = attending(name)
    assert out.abs().max() > 0.01
    of_heads = module.kv_b_proj.weight.unflatten(0, (out.shape[1], -1))
    for row in range(2):
        for head, maps in enumerate(of_heads):
            ups = maps[: -out.shape[3]], maps[-out.shape[3] :]
            held = given.query[row, head, 0], latents[row, 0], rotary[row, 0]
            for way in (latent.plain, latent.absorbed):
                assert torch.allclose(way(*held, *ups, given.scaling), out[row, head, 0], atol=1e-5)


def test_bytes_and_operations():
    """Counted by torch on a module of these sizes; and DeepSeek-V3's, from its configuration."""
    heads, rank, rotary, nope, value, tokens = 4, 12, 4, 6, 5, 37
    counted = latent_step(heads, rank, rotary, nope, value, tokens)
    up = torch.randn(heads, rank, nope), torch.randn(heads, rank, value)
    held, parts, query = torch.randn(tokens, rank), torch.randn(tokens, rotary), torch.randn(heads, 1, nope)
    asked = torch.randn(heads, 1, rotary)
    with FlopCounterMode(display=False) as flops:
        keys, values = held @ up[0], held @ up[1]
        scores = query @ keys.mT + asked @ parts.T
        plain = scores.softmax(-1) @ values
    assert flops.get_total_flops() == counted["plain"][1]
    with FlopCounterMode(display=False) as flops:
        scores = (query @ up[0].mT) @ held.T + asked @ parts.T
        other = scores.softmax(-1) @ held @ up[1]
    assert flops.get_total_flops() == counted["absorbed"][1] and torch.allclose(plain, other, atol=1e-3)
    assert counted["plain"][0] == counted["absorbed"][0] == 2 * (held.numel() + parts.numel())
    large = latent_step(heads=128, rank=512, rotary=64, nope=128, value=128, tokens=32_768)
    size, operations = zip(*large.values(), strict=True)
    assert size[0] / size[2] == pytest.approx(71, abs=0.2) and size[1] == size[2] == 32_768 * 1152
    assert operations[1] / operations[2] == pytest.approx(120, abs=2)  # what absorbing saves
    assert operations[2] / operations[0] == pytest.approx(3.4, abs=0.1)  # and what the latent costs


def test_a_turn_under_kivi_that_completes_no_block_is_taken():
    """A window of more tokens than there are: nothing is rounded, and the logits are those of `full`."""
    model, found = kvlab.prepare(family("DeepSeek-V2")), []
    for spec in ("full", "kivi4:group=3,recent=100"):
        cache = kvlab.make_cache(model, spec)
        with torch.no_grad():
            found.append([model(prompt(n, seed=n), past_key_values=cache).logits for n in (12, 1, 3, 7)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
