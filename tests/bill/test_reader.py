"""The bill as a reader meets it: tables, folders, names, bad input, the command."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from billed import DEVICES, MODELS
from tiny import tiny

import kvlab
from kvlab.bill.account import weights
from kvlab.methods import METHODS
from kvlab.spec import parse


@pytest.mark.parametrize("at, model", list(enumerate(MODELS)))
def test_every_model_on_devices_in_turn(at, model):
    """Three or four of ten: a table that fits 80 columns, or one line."""
    context, size = min(4096, MODELS[model]["context"]), weights(MODELS[model])
    for device, figures in [*DEVICES.items()][at % 3 :: 3]:
        if size > figures["memory"]:
            with pytest.raises(ValueError, match=r"its weights take .* GB and .* has .* GB"):
                kvlab.bill(model, device)
            continue
        bill = kvlab.bill(model, device, context, users=2, price=1.5)
        assert [line.method for line in bill.lines] == list(METHODS)
        assert max(map(len, str(bill).splitlines())) <= 80
        assert json.loads(json.dumps(asdict(bill)))["lines"][0]["method"] == "full"
        for line in bill.lines:
            assert line.refused or line.first in ("memory", "bandwidth", "link", "FLOP/s")
            assert (line.step is None) == (line.users == 0 or bool(line.refused))


def test_a_folder_or_a_config_is_a_model(tmp_path):
    tiny("llama").config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        bill = kvlab.bill(str(path), "L4", methods=["full", "h2o:budget=0.5"])
        assert bill.context == 128 and bill["full"].device_bytes == 128 * 2 * 3 * 2 * 8 * 2
        assert bill["h2o:budget=0.5"].device_bytes == bill["full"].device_bytes / 2


def test_budgets_are_said_and_what_is_no_lower_bound():
    """Every method that has a budget and does not name it, once, where it has one and is not refused."""
    given = [*METHODS, "h2o:budget=0.5", "topk:budget=9", "infinigen:alpha=inf"]
    bill = kvlab.bill("Llama-3.1-8B", "H200", 4096, methods=given)
    for page in (str(bill), bill._repr_html_()):
        said = " ".join(page.split())
        named = said.partition("budget 20 % of the tokens: ")[2].partition("<")[0].partition(" cache of")[0]
        wanted = {name for name in METHODS if parse(name).method.parameters.get("budget") == 0.2}
        assert set(named.split(", ")) == wanted | {"infinigen:alpha=inf"}
        most = said.partition("nothing real is smaller or quicker, except ")[2].partition(": what")[0]
        assert most.split(", ") == ["infinigen", "infinigen+int4", "infinigen:alpha=inf"]
    assert [line.budget for line in bill.lines[-3:]] == [0.5, 9, 0.2]
    plain = kvlab.bill("Llama-3.1-8B", "H200", 4096, methods=["full", "quest:budget=0.1"])
    assert "budget 20" not in str(plain) and "nothing real is smaller or quicker." in str(plain)


def test_a_model_that_load_knows_is_billed():
    found = kvlab.bill("workshop", "H200", 512, methods=["full"])
    assert (found.model, found.model_context) == ("workshop", 2048)
    assert found["full"].device_bytes == 8 * 8 * 2 * 32 * 512 * 2  # layers, heads, K and V, numbers, tokens


GIVEN = {"model": "Llama-3.1-8B", "device": "H200"}
BAD = {
    "did you mean meta-llama/Llama-3.1-8B": {"model": "Lama-3.1-8B"},
    "did you mean RTX 4090": {"device": "4090"},
    "known: facebook/opt-13b, ": {"model": "zzzzzzzz"},
    "context=0: expected": {"context": 0},
    "expected tokens, such as 8192 or 32k": {"context": "32M"},
    "of at least 1 token, at most 1000000000": {"context": 10**400},
    "price='2': expected": {"price": "2"},
    "model='no/such' is no folder": {"model": Path("no/such")},
    "is no folder, config.json or GGUF file, and not known": {"model": "a" * 5000},
    "did you mean H100 80GB?": {"device": "h100"},
    "methods: expected specs": {"methods": [None]},
    "was trained for 131,072 tokens": {"context": 131_073},
    "users=True: expected": {"users": True},
    "price=nan: expected": {"price": math.nan},
    "budget=1.5: expected": {"methods": ["h2o:budget=1.5"]},
    "unknown method 'h3o', did you mean h2o": {"methods": ["h3o"]},
    "leave link= out": {"methods": ["offload:link=1e9"]},
    "its weights take 141.1 GB and L4 has 24 GB": {"model": "Llama-3.1-70B", "device": "L4"},
    "max_length=1: expected": {"methods": ["padded:length=1"]},
}


@pytest.mark.parametrize("expected", BAD)
def test_bad_input_is_one_line(expected):
    with pytest.raises(ValueError) as raised:
        kvlab.bill(**GIVEN | BAD[expected])
    assert expected in str(raised.value) and "\n" not in str(raised.value)
