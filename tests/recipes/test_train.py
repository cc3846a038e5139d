"""The training command in small: wired initialisation, growth, stopping and going on, export."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from course.recipes import circuit, train
from eval.tasks import corpus
from kvlab import models

SHIPPED = models.EMBEDDED["workshop"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    rng = random.Random(0)
    rows = [{"text": " ".join(corpus.prose(rng, 12))} for _ in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def command(stories, out, *more):
    small = ["--hidden", "64", "--layers", "4", "--device", "cpu"]
    return ["--text", str(stories), "--out", str(out), "--tokenizer", str(SHIPPED), *small, *more]


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_wired_layers_find_the_token_after_an_earlier_copy(arch):
    torch.manual_seed(0)
    model = circuit.build(arch, 4, 256, 512, "cpu").eval()
    model.set_attn_implementation("eager")
    once = torch.randperm(500)[:24] + 2
    with torch.no_grad():
        attentions = model(once.repeat(2)[None], output_attentions=True).attentions
    query = torch.arange(24, 48)
    assert attentions[0][0, :4, query, query - 1].mean() > 0.9
    assert attentions[1][0, :4, query, query - 23].mean() > 0.2  # an even spread has 0.03


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(stories, tmp_path, arch, monkeypatch):
    monkeypatch.setattr(train, "table", lambda *_: "")
    monkeypatch.setattr(train, "LEVELS", ((32, 4, 2), (48, 4, 3)))
    more = ["--steps", "6", "--arch", arch]
    train.main(command(stories, tmp_path / "whole", *more))
    clock = iter(range(0, 10_000_000, 20))  # every look at the clock is 20 seconds later
    monkeypatch.setattr(train, "time", SimpleNamespace(time=lambda: next(clock)))
    for minutes in ("1", "600"):
        train.main(command(stories, tmp_path / "parts", "--minutes", minutes, *more))
        steps = torch.load(tmp_path / "parts" / "state.pt", weights_only=True)["step"]
        assert (0 < steps < 6) if minutes == "1" else steps == 6
    whole, parts = (torch.load(tmp_path / run / "state.pt", weights_only=True) for run in ("whole", "parts"))
    assert whole["rng"] == parts["rng"] and whole["tokens"] == parts["tokens"]
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_export_loads_without_a_network(arch, stories, tmp_path, monkeypatch):
    concentrated, concentrate = [], train.concentrate
    monkeypatch.setattr(
        train, "concentrate", lambda model, rows: concentrated.append(len(rows)) or concentrate(model, rows)
    )
    monkeypatch.setattr(train, "table", lambda *_: "")
    folder = tmp_path / "model"
    more = ["--arch", arch, "--steps", "2", "--grow-at", "0", "--export", str(folder)]
    train.main(command(stories, tmp_path / "run", *more))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 8 and model.dtype == torch.float16
    assert len(tokenizer(" Otis")["input_ids"]) == 1
    assert tokenizer.pad_token_id is not None and tokenizer.eos_token == "<|end|>"
    if arch == "llama":
        assert model.config.rope_parameters["rope_theta"] == train.STRETCHED and not concentrated
    else:
        assert concentrated == [len(train.documents())]
