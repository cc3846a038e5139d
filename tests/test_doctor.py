"""`kvlab doctor`: one line per check, and a check that fails says what to do."""

import contextlib
import random
import re
import sys
from importlib import metadata
from io import BytesIO, TextIOWrapper

import pytest

from kvlab import cli, doctor, extras
from kvlab.errors import STEERING

LINE = re.compile(r"^\[(ok|!!)\] \S.*$")
TROUBLE_SAYS_WHAT_TO_DO = re.compile(r"run `|install it|set OMP|close |clone again|choose another")


def failed(result):
    """The text of a failed check, after testing that it names a way out."""
    ok, text = result
    assert not ok
    assert "\n" not in text
    assert TROUBLE_SAYS_WHAT_TO_DO.search(text), text
    return text


def test_every_check_passes_here(capsys, tmp_path):
    code = doctor.run(results=tmp_path / "results")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, "\n".join(lines)
    assert len(lines) == len(doctor.checks())
    assert all(LINE.match(line) and line.startswith("[ok]") for line in lines)
    text = "\n".join(lines)
    for word in ("Python 3.", "torch 2.", "transformers 5.", "lm-eval 0.", "datasets ", "numpy "):
        assert f"[ok] {word}" in text
    assert re.search(r"memory bandwidth: reads \d+\.\d GB/s", text)
    assert re.search(r"free memory: \d+\.\d GiB", text)
    assert re.search(r"workshop model: \d+\.\d M parameters, loaded in \d+\.\d s", text)
    assert not (tmp_path / "results").exists(), "the doctor must leave nothing behind"


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A workshop's kit, to whose environment this Python seems to belong."""
    (tmp_path / "setup").mkdir()
    (tmp_path / "setup" / "start.py").touch()
    monkeypatch.setattr(extras.sys, "prefix", str(tmp_path / ".venv"))
    return tmp_path


def without(monkeypatch, *names):
    """As if these packages were not installed."""
    plain = metadata.version

    def version(name):
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(metadata, "version", version)


def test_what_a_kit_brings_on_request_is_no_damage_there(kit, monkeypatch):
    assert extras.kit_folder() == kit
    without(monkeypatch, "lm-eval", "numpy", "numba")
    for check in (lambda: doctor.check_package("lm-eval"), doctor.check_kernels):
        ok, text = check()
        assert ok is not False and "delete .venv" not in text and "pip install" not in text
    assert "--all` adds it" in doctor.check_package("lm-eval")[1]
    assert "numpy is not installed: run" in failed(doctor.check_package("numpy"))


def test_outside_a_kit_what_is_missing_is_damage(monkeypatch):
    assert extras.kit_folder() is None
    without(monkeypatch, "lm-eval", "numba", "numpy")
    assert doctor.check_package("lm-eval") == (None, extras.line("lm_eval"))
    assert "numpy is not installed: run" in failed(doctor.check_package("numpy"))
    assert "numba is not installed" in failed(doctor.check_kernels())


def test_damaged_weights(monkeypatch):
    import torch

    import kvlab

    model, tokenizer = kvlab.load()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    monkeypatch.setattr(kvlab, "load", lambda: (model, tokenizer))
    assert "the checkpoint is damaged" in failed(doctor.check_model())


@pytest.mark.parametrize("arguments", [[], ["docter"], ["doctor", "--fast"], ["methods", "h2o", "tova"]])
def test_bad_arguments_are_one_line_and_code_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("kvlab: error: ")
    assert err.count("\n") == 1


ASK = (
    ["doctor", "--model"], ["doctor", "--method"], ["methods"], ["fetch"], ["gate", "--text"], [],
    ["bill", "--device", "H100", "--model"], ["ask", "--question", "Who?", "--context"],
)  # fmt: skip


def test_a_terminal_that_lacks_letters(monkeypatch):
    with TextIOWrapper(BytesIO(), encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        assert cli.main(["methods"]) == 0
        narrow.seek(0)
        assert "adakv" in narrow.read()


@pytest.mark.parametrize("seed", range(12))
def test_no_name_steers_a_terminal(seed, capsys):
    """Escapes, carriage returns and marks of direction are written out, wherever a line names what it got."""
    dice = random.Random(seed)
    for words in ASK:
        odd = dice.choice(["\x1b[2J", "a\rb", "\x9b31m", "\u202eb", "x\x07", "\x7f", "\u2066"])
        with contextlib.suppress(SystemExit):
            assert cli.main([*words, f"no{odd}where"]) in (1, 2)
        said = "".join(capsys.readouterr())
        assert said and not STEERING.search(said.replace("\n", "")), (words, odd)
