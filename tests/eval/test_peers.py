"""Peers: two sides of a document compared, each by files and in a process of its own."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval.reproduce import peers
from eval.reproduce.peers import PAIRS, Peers
from eval.reproduce.sides import Ours, Theirs, answered
from kvlab.models import source_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = {"ids": list(range(3, 43)), "cut": 36, "choices": [[5], [6, 7]], "label": 1, "kept": 12}


class Dropping:
    """As a press: keeps the same places of every layer and head, in any order."""

    def __init__(self, compression_ratio):
        self.places = [7, 2, 35]

    @contextlib.contextmanager
    def __call__(self, model):
        def drop(module, _, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, self.places], layer.values[:, :, self.places]

        layers = [layer.self_attn for layer in model.model.layers]
        hooks = [layer.register_forward_hook(drop, with_kwargs=True) for layer in layers]
        yield
        for hook in hooks:
            hook.remove()


class Masking(Dropping):
    """As AdaKV's: nothing goes, and the layer says what is hidden. Of 2 heads the first hides token 4."""

    @contextlib.contextmanager
    def __call__(self, model):
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = (torch.tensor([0]), torch.tensor([0]), torch.tensor([4]))
        yield


KVPRESS = SimpleNamespace(
    KVzipPress=type("KVzipPress", (), {}),
    KeyRerotationPress=type("KeyRerotationPress", (), {"rerotate_keys": staticmethod(lambda *a: a)}),
    DroppingPress=Dropping,
    MaskingPress=Masking,
)


@pytest.fixture()
def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_both_sides_score_what_the_model_says(plain, loaded):
    """`full` and a plain cache: the log-probabilities of one pass over everything."""
    sides = Ours(loaded[0], "full"), Theirs(KVPRESS, plain, None, 0.8)
    told = [answered(side, DOCUMENT) for side in sides]
    assert all(one["held"] == [[list(range(36))] * 2] * 3 for one in told)
    for index, choice in enumerate(DOCUMENT["choices"]):
        ids = torch.tensor([DOCUMENT["ids"] + choice])
        with torch.no_grad():
            logits = plain(ids).logits[0].log_softmax(-1)
        wanted = sum(logits[39 + i, token].item() for i, token in enumerate(choice))
        assert [one["scores"][index] for one in told] == pytest.approx([wanted] * 2, abs=1e-4)
    assert all(one["bytes"] >= 2 * 3 * 2 * 36 * plain.config.head_dim * 4 for one in told)


def test_the_tables_name_every_pair_and_no_other():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- results: peers (\S+) -->\n(.*?)<!-- end", text, re.DOTALL)
    named_in = {model: re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) for model, table in shown}
    assert named_in["workshop"] == [pair["method"] for pair in PAIRS]
    assert all(set(names) <= set(named_in["workshop"]) for names in named_in.values())


@pytest.mark.skipif(not peers.THERE.is_file(), reason="make peers builds kvpress's environment")
def test_kvpress_itself_holds_what_we_hold():
    """Two pairs whose definitions are one, and one that differs by the newest token."""
    asked = Peers(limit=1, tasks=("recall",))
    wanted = ("full", "tova", "keydiff")
    cells = [c for c in asked.cells() if c.method in wanted and c.task.endswith("context-first")]
    model = str(source_of(None))
    made = dict(asked.pairs(cells, asked.documents(model, "recall", "context-first"), model))
    rows = {cell.method: found["row"] for cell, found in made.items()}
    assert all(rows[name]["same_heads"] == 1 and rows[name]["most_apart"] < 1e-4 for name in wanted[:2])
    assert rows["keydiff"]["but_newest"] == 1
