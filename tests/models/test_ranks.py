"""Tensor parallelism: two processes that share a model's heads give what one gives, method by method."""

import json
from itertools import product
from pathlib import Path

import pytest
from split import torchrun
from tiny import EACH, tiny

import kvlab
from kvlab import ranks

TESTS = Path(__file__).resolve().parents[1]
TOGETHER = (
    "kvquant",
    "shadowkv:budget=0.3,rank=0.4,chunk=3,recent=1",
    "int8:axis=tensor",
    "int4:axis=tensor,rotate=true",
)  # heads share numbers: refused
WHOLE = ("duo:heads=0.4", "kvzap")  # want a profile of the whole model: refused
SPECS = [spec for spec in EACH if spec not in ("recompute", *TOGETHER)] + [
    "infinigen:budget=0.3,alpha=1",  # alpha decides, by a mean over all heads
    "infinigen:budget=0.3,pool=0.7,alpha=inf",
    "infinigen:budget=0.5,alpha=1,variant=official-accuracy",
    "infinigen:budget=0.5,alpha=0.5,variant=official-accuracy-llama",
    "kvzip:budget=0.4,over=layer",
]
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
ROUNDED = 1e-3  # of coarse formats, whose codes may move with the last bit of a sum


def test_two_processes_give_what_one_gives_or_refuse_it(tmp_path):
    """Refused is what needs all heads, or the whole model."""
    tiny("llama", "sdpa").save_pretrained(tmp_path)
    refused = dict.fromkeys(TOGETHER, "all KV heads share numbers in this format")
    refused |= dict.fromkeys(WHOLE, "split among processes")
    done = torchrun(str(TESTS / "split.py"), str(tmp_path), *SPECS, *refused)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {(line["rank"], line["method"]): line for line in lines}
    for rank, spec in product((0, 1), SPECS):
        line = found[rank, spec]
        assert line["apart"] < ROUNDED and line["heads"] == 1, spec  # of two
        one, here, together = line["held"]
        assert here < one and together == sum(found[r, spec]["held"][1] for r in (0, 1)), spec
    for rank, spec in product((0, 1), refused):
        told = found[rank, spec]["refused"]
        assert refused[spec] in told and "\n" not in told


def test_one_process_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="there is one process; start several"):
        kvlab.load(tensor_parallel=True)


@pytest.mark.parametrize(
    ("family", "changes", "count", "said"),
    [
        ("opt", {}, 2, "no plan for 'opt'"),
        ("gpt2", {}, 2, "no plan for 'gpt2'"),
        ("llama", {}, 4, "4 processes do not divide 4 heads with 2 KV heads"),
        ("llama", NINE, 2, "do not divide 9 heads with 3"),
    ],
)
def test_what_cannot_be_split_is_refused_before_it_is_loaded(
    tmp_path, monkeypatch, family, changes, count, said
):
    tiny(family, "sdpa", **changes).config.save_pretrained(tmp_path)  # and no weights
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(ValueError, match=rf"^[^\n]*{said}[^\n]*$"):
        ranks.split(tmp_path)
