"""What the recipes for profiles cannot do is one line."""

import re
import sys

import pytest

from course.recipes import duo, kvzap

COMMANDS = {"duo": duo.main, "kvzap": kvzap.main}
BAD = [
    ("duo", "--tokens 60", "--tokens 60: too few; these documents have 1.. or more"),
    ("duo", "--steps 0", "--steps=0: expected a whole number of at least 1 documents"),
    ("kvzap", "--documents 1", "--documents=1: expected a whole number of at least 2 texts"),
    ("kvzap", "--share 1.5", "--share=1.5: expected a share between 0 and 1"),
    ("kvzap", "--tokens 60", "share=0.2: the newest 16 tokens of a text are 27% of it"),
    ("kvzap", "--model workshop-opt", r"OPTForCausalLM has no rotary embedding \(RoPE\)"),
]
for both in COMMANDS:
    BAD += [
        (both, "--recent 0", "--recent=0: expected a whole number of at least 1 tokens"),
        (both, "--model nosuch", "no tokenizer could be loaded from 'nosuch'.*"),
        (both, "--out nowhere/file", "nowhere/file: there is no such folder"),
    ]


@pytest.mark.parametrize("name, given, said", BAD)
def test_bad_input_is_one_line(name, given, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", f"{name} --model workshop --out {tmp_path}/file {given}".split())
    with pytest.raises(SystemExit) as exit:
        COMMANDS[name]()
    assert exit.value.code == 2
    assert re.fullmatch(rf"python -m course\.recipes\.{name}: error: {said}\n", capsys.readouterr().err)
