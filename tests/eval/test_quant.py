"""The quantization experiments: re-quantization by hand, and the command."""

import json

import pytest
import torch
from tiny import started, tiny

from eval.__main__ import main
from eval.studies import quant, questions
from kvlab.store import Int


def test_an_evicting_method_holds_fewer_bits_for_each_number():
    assert quant.bits_per_value(tiny("llama"), "h2o:budget=0.5", 64) < 0.75 * 32


def rounded(x, bits):
    """One fp16 scale for a whole tensor, rounded up; in plain arithmetic."""
    step = (x.abs().max() / (2 ** (bits - 1) - 1)).item()
    half = torch.tensor(step).half()
    half = half if half.float() >= step else torch.nextafter(half, torch.tensor(torch.inf).half())
    return torch.round(x / half.float()) * half.float()


@pytest.mark.parametrize("bits", [8, 4])
def test_requantizing_rounds_everything_again(bits):
    """Against a loop by hand: each step rounds what the last one left, and the new token."""
    generator = torch.Generator().manual_seed(bits)
    store, held = started(quant.Requantized(Int(bits, axis="tensor"))), torch.empty(1, 2, 0, 8)
    for step in range(30):
        new = torch.randn(1, 2, 1, 8, generator=generator) * (1 + step / 5)  # ever larger
        store.append(new, -new)
        held = rounded(torch.cat([held, new], 2), bits)
    keys, values = store.read(torch.device("cpu"))
    assert torch.allclose(keys, held, atol=1e-5) and torch.allclose(values, -held, atol=1e-5)


def test_rows(tmp_path, folder, monkeypatch):
    for name in ("FACTS", "FILLER"):  # documents that fit into 512 tokens of a byte-level vocabulary
        monkeypatch.setattr(questions, name, 2)
    out = tmp_path / "found"
    words = f"quant --model {folder} --limit 8 --methods full,int2 --out {out}".split()
    assert main(words) == 0
    rows = json.loads((out / "quant.json").read_text())
    found = {(r["method"], r["metric"]): r["value"] for r in rows if r["experiment"] == "bits"}
    assert found["full", "bits per value"] == pytest.approx(32)
    assert found["int2", "bits per value"] == pytest.approx(2 + 16 / 8)
    assert found["int2", "perplexity"] != found["full", "perplexity"]
    errors = {r["method"]: r["value"] for r in rows if r["metric"] == "error of K in layer 0"}
    assert errors["full"] == 0 < errors["int8, scale per token"] < errors["int4, scale per token"]
    monkeypatch.setattr(quant, "EXPERIMENTS", {})  # nothing is made again
    assert main(words) == 0
    assert json.loads((out / "quant.json").read_text()) == rows
