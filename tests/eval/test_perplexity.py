"""Perplexity against position: every token predicted through the cache, the text's own token fed."""

import math
from unittest.mock import Mock

import pytest
import torch

import kvlab
from eval.command import main
from eval.core.results import Store
from eval.studies import perplexity


@pytest.fixture(scope="module")
def loaded():
    return kvlab.load()


def test_full_loses_what_one_pass_over_the_text_loses(loaded):
    model, tokenizer = loaded
    ids = perplexity.chunks(tokenizer, None, 48, 3)
    assert ids.shape == (3, 48)
    found = dict(perplexity.measure(model, ["full", "int2", "h2o:budget=6"], ids, 16, batch=2))
    with torch.inference_mode():
        logits = model(ids).logits[:, 15:-1].float()
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 16:], reduction="none")
    torch.testing.assert_close(found["full"]["losses"].float(), expected, atol=1e-4, rtol=1e-4)
    assert found["int2"]["losses"].mean() > expected.mean()
    assert found["h2o:budget=6"]["scored"] == pytest.approx(0.5)


def test_places_are_means_over_chunks():
    losses = torch.tensor([[1.0] * 32 + [2.0] * 18, [3.0] * 32 + [2.0] * 18], dtype=torch.double)
    told = perplexity.numbers(losses, 100)
    assert told["perplexity"] == pytest.approx(math.exp(2.0))
    assert told["rows"] == [
        {"position": 100, "tokens": 32, "loss": 2.0, "stderr": pytest.approx(1.0)},
        {"position": 132, "tokens": 18, "loss": 2.0, "stderr": 0.0},
    ]


def test_a_cell_lands_when_its_method_is_done(loaded, monkeypatch):
    """Also of a method that fails, and then the others go on."""
    model, tokenizer = loaded
    ids = perplexity.chunks(tokenizer, None, 48, 3)
    read = Mock(side_effect=[RuntimeError("gone"), torch.ones(2, 32)])
    monkeypatch.setattr(perplexity, "_read_on", read)
    methods = perplexity.measure(model, ["full", "int8", "int2"], ids[:2], 16, batch=2)
    assert [next(methods)[0] for _ in range(2)] == ["full", "int8"]
    assert read.call_count == 2


def test_a_run_is_stored_drawn_and_kept(tmp_path, capsys):
    words = ["perplexity", "--chunk", "64", "--limit", "2", "--methods", "full,h2o", "--budgets", "0.1,0.4"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    cells = list(Store(tmp_path).records())
    assert [cell["method"] for cell in cells] == ["full", "h2o:budget=0.1", "h2o:budget=0.4"]
    assert (tmp_path / "perplexity.svg").is_file() and (tmp_path / "perplexity.json").is_file()
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "everything is there" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path), "--chunk", "900000"]) == 2
    assert "the text has" in capsys.readouterr().err
