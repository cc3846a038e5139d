"""The bill as a reader meets it: tables, folders, names, bad input, the command."""

import json
import math
from dataclasses import asdict

import pytest
from billed import DEVICES, MODELS
from tiny import tiny

import kvlab
from kvlab.bill.account import seen, weights
from kvlab.cli import main
from kvlab.methods import METHODS


@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_device(model):
    """Every combination is a table that fits 80 columns, or one line."""
    context, size = min(4096, MODELS[model]["context"]), weights(MODELS[model])
    for device, figures in DEVICES.items():
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


def test_a_bill_in_a_notebook_has_a_row_for_every_method():
    bill = kvlab.bill("gemma-3-27b-it", "H200", 4096)
    page = bill._repr_html_()
    assert page.count("<tr>") == 1 + len(METHODS) and "not on this model" in page
    assert "cost" not in page and "bytes moved / link" in page and repr(bill) == str(bill)


def test_a_folder_or_a_config_is_a_model(tmp_path):
    tiny("llama").config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        bill = kvlab.bill(str(path), "L4", methods=["full", "h2o:budget=0.5"])
        assert bill.context == 128 and bill["full"].device_bytes == 128 * 2 * 4 * 2 * 8 * 2
        assert bill["h2o:budget=0.5"].device_bytes == bill["full"].device_bytes / 2


def test_what_a_config_leaves_out_is_told(tmp_path):
    """Weights that are quantized and parts that are no text stand in the name; code of a model is not run."""
    values = tiny("llama").config.to_dict()
    for more, told in {
        "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "though they are quantized"),
        "text": ({"model_type": "llava", "text_config": values}, "its text part"),
    }.values():
        (tmp_path / "config.json").write_text(json.dumps(values | more))
        assert told in kvlab.bill(str(tmp_path), "L4", 100, methods="full").model
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    with pytest.raises(ValueError, match="not a configuration that transformers reads"):
        kvlab.bill(str(tmp_path), "L4")


def test_names_are_read_kindly():
    bill = kvlab.bill("llama-3.1-8b", "rtx 4090", 100, methods=["full"])
    assert (bill.model, bill.device) == ("meta-llama/Llama-3.1-8B", "RTX 4090")
    assert seen({"window": 8}, 20) == 7


GIVEN = {"model": "Llama-3.1-8B", "device": "H200"}
BAD = {
    "did you mean meta-llama/Llama-3.1-8B": {"model": "Lama-3.1-8B"},
    "did you mean RTX 4090": {"device": "4090"},
    "known: facebook/opt-13b, ": {"model": "zzzzzzzz"},
    "context=0: expected": {"context": 0},
    "context=1.5: expected": {"context": 1.5},
    "was trained for 131,072 tokens": {"context": 131_073},
    "users=1.5: expected": {"users": 1.5},
    "users=0: expected": {"users": 0},
    "users=True: expected": {"users": True},
    "price=-1: expected": {"price": -1},
    "price=nan: expected": {"price": math.nan},
    "price=inf: expected": {"price": math.inf},
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


def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        kvlab.bill(str(tmp_path), "H200")
    for text in ("{", "[]", '{"model_type": "nobody"}', '{"model_type": "t5"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError) as raised:
            kvlab.bill(str(tmp_path), "H200")
        assert "\n" not in str(raised.value)


def test_the_command_prints_the_bill_and_the_flags(capsys):
    methods = ["--methods", "full,h2o:budget=0.1,recent=0.3", "int4"]
    assert main(["bill", "--model", "Llama-3.1-8B", "--device", "H200", "--users", "2", *methods]) == 0
    printed = capsys.readouterr().out
    assert "h2o:budget=0.1,recent=0.3" in printed and "-ctk q4_0 -ctv q4_0" in printed
    assert "In none of the four: eviction by attention" in printed and "fp8" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert main(["bill", "--model", "Lama-3.1-8B", "--device", "H200"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvlab: error: model='Lama-3.1-8B'") and told.count("\n") == 1
