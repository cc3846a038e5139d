"""The training command in small: wired initialisation, growth, stopping and going on, export."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlab.workshop import circuit, corpus, train


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    rng = random.Random(0)
    rows = [{"text": " ".join(corpus.prose(rng, 12))} for _ in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def command(stories, out, *more):
    return ["--text", str(stories), "--out", str(out), "--hidden", "64", "--layers", "4", *more]


def test_wired_layers_find_the_token_after_an_earlier_copy():
    torch.manual_seed(0)
    model = circuit.build("llama", 4, 256, 512, "cpu").eval()
    model.set_attn_implementation("eager")
    once = torch.randperm(500)[:24] + 2
    with torch.no_grad():
        attentions = model(once.repeat(2)[None], output_attentions=True).attentions
    query = torch.arange(24, 48)
    assert attentions[0][0, :4, query, query - 1].mean() > 0.9
    assert attentions[1][0, :4, query, query - 23].mean() > 0.1  # an even spread has 0.03


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_growing_leaves_the_logits_as_they_are(arch):
    torch.manual_seed(0)
    model = circuit.build(arch, 2, 64, 512, "cpu").eval()
    ids = torch.randint(2, 500, (2, 40))
    with torch.no_grad():
        before = model(ids).logits
        after = circuit.grow(model, arch, "cpu").eval()(ids).logits
    torch.testing.assert_close(after, before)


def test_blocked_attention_is_causal_attention():
    q, k, v = torch.randn(3, 2, 4, 70, 32).unbind()
    out, _ = circuit.blocked(None, q, k, v, None, scaling=32**-0.5, block=32)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, exact.transpose(1, 2))


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(stories, tmp_path, arch, monkeypatch):
    monkeypatch.setattr(train, "table", lambda *_: "")
    monkeypatch.setattr(train, "LEVELS", ((32, 4, 2), (48, 4, 3)))
    more = ["--minutes", "600", "--arch", arch, "--device", "cpu"]
    train.main(command(stories, tmp_path / "whole", "--steps", "6", *more))
    for steps in ("3", "6"):
        train.main(command(stories, tmp_path / "parts", "--steps", steps, *more))
    whole, parts = (torch.load(tmp_path / run / "state.pt", weights_only=False) for run in ("whole", "parts"))
    assert whole["rng"] == parts["rng"] and whole["tokens"] == parts["tokens"]
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, rtol=0, atol=1e-5)


def test_export_loads_without_a_network(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "table", lambda *_: "")
    folder = tmp_path / "model"
    more = ["--steps", "2", "--grow-at", "0", "--export", str(folder), "--device", "cpu"]
    train.main(command(stories, tmp_path / "run", *more))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 8 and model.dtype == torch.float16
    assert len(tokenizer(" Otis")["input_ids"]) == 1
    assert tokenizer.pad_token_id is not None and tokenizer.eos_token == "<|end|>"


def test_table_names_every_task(stories, monkeypatch):
    monkeypatch.setattr(train, "TASKS", {"recall 2": lambda rng: corpus.recall(rng, 2)})
    tokenizer = train.fit(list(corpus.stories([stories])))
    model = circuit.build("llama", 2, 64, len(tokenizer), "cpu")
    lines = train.table(model, tokenizer, ["The baker sang a quiet song."], 2).splitlines()
    assert lines[0].startswith("recall 2") and lines[1].endswith("bits/byte")
