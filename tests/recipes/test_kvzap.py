"""The surrogate of KVzap is calibrated: ridge regression, the threshold, and the profile of both."""

import sys

import torch
from reference.definitions import keep
from tiny import begun, prompt, tiny

import kvlab
from course.recipes import kvzap
from kvlab.calibrate import profile
from kvlab.keep import KVzip
from kvlab.keep.kvzap import KVzap


def test_ridge_is_its_definition():
    """Two targets from sums over pieces, of numbers of different sizes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 7, generator=draw).double() * torch.arange(1, 8) + 3
    y = torch.randn(60, 2, generator=draw).double() + x[:, :2]
    fit = kvzap.Ridge(7, 2)
    for piece in torch.arange(60).split(17):
        fit.add(x[piece], y[piece])
    weight, bias = fit.solve()
    penalty = kvzap.PENALTY * float(x.square().sum(0).mean())
    for head in range(2):
        wanted = keep.ridge(x, y[:, head], penalty)
        assert torch.allclose(weight[head], wanted[0], atol=1e-9) and torch.isclose(bias[head], wanted[1])


def test_the_scores_are_those_that_kvzip_chooses_by():
    """And what stands beside them is what the keep reads of a token."""
    model, ids, chosen = tiny("llama"), prompt(20)[0].tolist(), []

    class Chosen(KVzip):
        def agree(self, layers):
            chosen.extend(layer.state.scores[0].T.clone() for layer in layers)
            super().agree(layers)

    kvlab.Stepper(model, kvlab.KVCache(model, keep=Chosen(0.5, sinks=0))).feed(torch.tensor([ids]))
    found = list(kvzap.heard(model, [ids, ids[:9]]))
    assert [order for order, _, _ in found] == [0, 1, 2] * 2
    for (_, x, y), scores in zip(found, chosen):
        assert torch.allclose(y.exp().float(), scores, atol=1e-6) and x.shape == (20, 2 * (8 + 8))


def test_the_command_writes_a_profile_that_the_keep_reads(tmp_path, monkeypatch, capsys):
    """Nearly the share asked for is held, of texts like those that were read."""
    out = tmp_path / "workshop-kvzap.safetensors"
    words = ["--model", "workshop", "--documents", "4", "--tokens", "80", "--share", "0.4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["kvzap", *words])
    kvzap.main()
    assert "of the variance" in (said := capsys.readouterr().out) and str(out) in said
    model, _ = kvlab.load()
    found = profile.read(out, "kvzap", weight=3, bias=2)
    assert found.about["share"] == 0.4 and found.arrays["weight"].shape == (8, 8, 8 * 64)
    cache = begun(model, f"kvzap:profile={out},recent=2", prompt(60)).cache
    held = sum(int((layer.positions >= 0).sum()) for layer in cache.layers)
    assert 2 * 64 <= held < 60 * 64 and isinstance(cache.layers[0].keep.policy, KVzap)
