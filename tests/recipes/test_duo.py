"""The gates of DuoAttention are trained: the gated attention, the loss, and what a head that matters gets."""

import sys

import torch
from tiny import begun, prompt, tiny

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


def test_the_command_writes_a_profile_that_the_keep_reads(tmp_path, monkeypatch, capsys):
    out = tmp_path / "workshop-duo.safetensors"
    words = ["--model", "workshop", "--steps", "2", "--tokens", "250", "--recent", "9", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["duo", *words])
    duo.main()
    assert str(out) in capsys.readouterr().out
    model, _ = kvlab.load()
    assert profile.read(out, "duo", gates=2).about == {"sinks": 4, "recent": 9, "steps": 2}
    cache = begun(model, f"kvlab.keep.Duo:profile={out},heads=0", prompt(60)).cache
    assert {int(n) for layer in cache.layers for n in (layer.positions >= 0).sum(-1).flatten()} == {13}
    assert isinstance(cache.layers[0].keep.policy, Duo)
