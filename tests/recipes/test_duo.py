"""The gates of DuoAttention are trained: the gated attention, the loss, and what a head that matters gets."""

import copy
import sys

import pytest
import torch
from families.models import family
from tiny import prompt, tiny

import kvlab
from course.recipes import duo
from kvlab.calibrate import profile
from kvlab.keep import Duo


def test_open_gates_are_the_model_and_closed_ones_the_window():
    """Grouped queries; in between, a head's output is the mixture."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    module = type("Module", (), {"layer_idx": 3})
    gates = torch.tensor([[9.0, 9.0], [1.0, 0.25]])
    out, _ = duo.Gated(gates, {0: 0, 3: 1}, 2, 3)(module, query, key, value, None, scaling=0.5)
    for head in range(4):
        scores = query[0, head] @ key[0, head // 2].T * 0.5
        masks = torch.ones(9, 9).tril().bool(), duo.streams(9, 2, 3)
        full, near = (
            scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value[0, head // 2] for mask in masks
        )
        gate = gates[1, head // 2]
        assert torch.allclose(out[0, :, head], gate * full + (1 - gate) * near, atol=1e-5)


def test_gates_close_where_a_window_does_and_the_model_is_left_as_it_was():
    """A window that is longer than the text changes nothing, so that the gates' mean alone is what counts."""
    model = tiny("llama", num_hidden_layers=2)
    before, weights = model.config._attn_implementation, [w.clone() for w in model.parameters()]
    logits = model(prompt(12)).logits
    rows = [(prompt(20, seed=seed)[0].tolist(), 2) for seed in range(8)]
    closed = duo.train(model, rows, 2, 30)
    assert closed.shape == (2, 2) and torch.allclose(closed, torch.full((2, 2), 1 - 8 * duo.RATE), atol=1e-3)
    kept = duo.train(model, rows, 0, 1)  # each token sees itself alone
    assert (kept > closed).any()
    assert model.config._attn_implementation == before and all(w.requires_grad for w in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model(prompt(12)).logits, logits)


def test_the_loss_is_of_the_answer_and_gates_end_at_0_and_1(monkeypatch):
    """The first step closes all gates: windows in place of attention, which are a mask to a model."""
    model, own = tiny("llama"), tiny("llama", "sdpa").base_model
    rows = [(prompt(20, seed=seed)[0].tolist(), answer) for seed, answer in ((0, 2), (1, 3))]
    monkeypatch.setattr(duo, "RATE", 1.5)  # beyond 0, were the gates not clamped
    said = []
    gates = duo.train(model, rows, 2, 3, said.append)
    ids = torch.tensor([rows[1][0]])
    with torch.no_grad():
        target, found = (
            own(ids, attention_mask=mask)[0][0] for mask in (None, duo.streams(20, 2, 3)[None, None])
        )
    loss = (found - target)[16:19].square().mean()  # where the last three of 20 tokens are predicted
    assert f"2/2: loss {loss:.4f}, " in said[1] and loss > 0.1
    assert gates.min() == 0 and gates.max() == 1


def test_a_model_that_open_gates_change_is_refused():
    """And left as it was; where no text is longer than its window, it is the model."""
    model = tiny("mistral", sliding_window=9)
    rows = [(prompt(size)[0].tolist(), 2) for size in (5, 20)]
    for other in (model, kvlab.prepare(copy.deepcopy(family("Gemma 2")))):
        before = other.config._attn_implementation
        with pytest.raises(
            ValueError, match=r"attends by windows, a soft cap or sinks, .* cannot be trained"
        ):
            duo.train(other, rows, 2, 3)
        assert other.config._attn_implementation == before and next(other.parameters()).requires_grad
    assert duo.train(model, rows[:1], 2, 3).shape == (4, 2)
    with pytest.raises(ValueError, match=r"^latents are cached: all heads share them"):
        duo.train(family("DeepSeek-V3"), rows, 2, 3)


def test_the_command_writes_a_profile_that_the_keep_reads(tmp_path, monkeypatch, capsys):
    out = tmp_path / "workshop-duo.safetensors"
    words = ["--model", "workshop", "--steps", "2", "--tokens", "250", "--recent", "9", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["duo", *words])
    duo.main()
    assert str(out) in capsys.readouterr().out
    model, _ = kvlab.load()
    assert profile.read(out, "duo", gates=2).about == {"sinks": 4, "recent": 9, "steps": 2}
    cache = kvlab.make_cache(model, f"kvlab.keep.Duo:profile={out},heads=0")
    kvlab.Stepper(model, cache).feed(prompt(60))
    assert {int(n) for layer in cache.layers for n in (layer.positions >= 0).sum(-1).flatten()} == {13}
    assert isinstance(cache.layers[0].keep.policy, Duo)
