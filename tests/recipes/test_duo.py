"""The gates of DuoAttention are trained: the gated attention, the loss, and what a head that matters gets."""

import sys

import torch
from tiny import prompt, tiny

import kvlab
from kvlab.calibrate import profile
from kvlab.keep import Duo
from recipes import duo


def test_streams():
    seen = duo.streams(9, 2, 3)
    for query in range(9):
        wanted = [key for key in range(query + 1) if key < 2 or key > query - 3]
        assert seen[query].nonzero()[:, 0].tolist() == wanted


def test_open_gates_are_the_model_and_closed_ones_the_window():
    """Grouped queries; in between, a head's output is the mixture."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    module = type("Module", (), {"layer_idx": 1})
    gates = torch.tensor([[9.0, 9.0], [1.0, 0.25]])
    out, _ = duo.Gated(gates, 2, 3)(module, query, key, value, None, scaling=0.5)
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


def test_the_command_writes_a_profile_that_the_keep_reads(tmp_path, monkeypatch, capsys):
    out = tmp_path / "workshop-duo.safetensors"
    words = ["--model", "workshop", "--steps", "2", "--tokens", "250", "--recent", "9", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["duo", *words])
    duo.main()
    assert str(out) in capsys.readouterr().out
    model, _ = kvlab.load()
    assert profile.read(out, "duo").about == {"sinks": 4, "recent": 9, "steps": 2}
    cache = kvlab.make_cache(model, f"kvlab.keep.Duo:profile={out},heads=0")
    kvlab.Stepper(model, cache).feed(prompt(60))
    assert {int(n) for layer in cache.layers for n in (layer.positions >= 0).sum(-1).flatten()} == {13}
    assert isinstance(cache.layers[0].keep.policy, Duo)
