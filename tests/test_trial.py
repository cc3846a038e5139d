"""`kvlab doctor --method`: what is wrong with a method of one's own is one line, and the right line."""

import re
from pathlib import Path

import pytest
import torch

from kvlab import cli, faster, trial
from kvlab.keep import Keep


class Fine(Keep):
    def score(self, layer):
        return layer.slot_positions.float() % 7


class NotANumber(Keep):
    def score(self, layer):
        return layer.slot_positions.float().log() * float("nan")


class OtherShape(Keep):
    def score(self, layer):
        return layer.slot_positions[:, 0].float()


class OneHeadForAll(Keep):
    def score(self, layer):
        return layer.slot_positions[:, :1].float().expand(-1, 2, -1)


class PlacesInTheBuffer(Keep):
    def score(self, layer):
        return (torch.arange(layer.slot_positions.shape[-1]) % 5).expand_as(layer.slot_positions).float()


class OtherRows(Keep):
    def score(self, layer):
        keys, _ = layer.store.read(layer.slot_positions.device)
        return (keys.norm(dim=-1) - keys.norm(dim=-1).flip(0)).round(decimals=3)


class MoreThanTheBudget(Keep):
    def limits(self, layer):
        return [tokens - 1 for tokens in super().limits(layer) for tokens in [60]]

    def score(self, layer):
        return layer.slot_positions.float()


WRONG = {
    Fine: None,
    NotANumber: "runs",
    OtherShape: "runs",
    OneHeadForAll: "grouped heads",
    PlacesInTheBuffer: "a row of a padded batch",
    OtherRows: "a row of a padded batch",
    MoreThanTheBudget: "budget",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_the_first_bad_line_names_it(kind, capsys):
    code = trial.run(f"{__name__}.{kind.__name__}:budget=0.4")
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"^\[(ok|!!)\] \S.*: \S", line) for line in lines) and len(lines) == 6
    bad = [line for line in lines if line.startswith("[!!]")]
    if WRONG[kind] is None:
        assert code == 0 and not bad
    else:
        assert code == 1 and bad[0].startswith(f"[!!] {WRONG[kind]}")


@pytest.mark.parametrize(
    "method",
    [
        "int4",
        "kivi2",
        "static:length=100",
        "quest",
        "pyramidkv",
        "h2o",
        "padded",
        "turboquant",
        "kvquant:outliers=0.1",
    ],
)
def test_kvlabs_own_methods_pass(method, capsys):
    assert trial.run(method) == 0, capsys.readouterr().out


def test_compiled_code_takes_its_steps_where_it_is_there(monkeypatch):
    taken, step = [], faster.step
    monkeypatch.setattr(faster, "step", lambda *given: taken.append(step(*given)) or taken[-1])
    assert trial.run(f"{__name__}.Fine:budget=0.4") == 0
    assert any(out is not None for out in taken) or faster.lodger() is None


class OnlyInSinglePrecision(Keep):
    def score(self, layer):
        keys, _ = layer.store.read(layer.slot_positions.device)
        return (keys @ torch.ones(keys.shape[-1], 1)).squeeze(-1)


def test_a_class_of_one_dtype_is_told_which_one_it_lacks(capsys):
    assert trial.run(f"{__name__}.OnlyInSinglePrecision:budget=0.4") == 1
    assert "[!!] a row of a padded batch is the row alone: in torch.float64: " in capsys.readouterr().out


def test_the_example_of_the_page_passes(tmp_path, monkeypatch, capsys):
    text = Path(__file__).resolve().parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine_of_the_page.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    said = cli.main(["doctor", "--method", "mine_of_the_page.SmallestKeys:budget=0.4"])
    assert said == 0, capsys.readouterr().out
    assert cli.main(["doctor", "--method", "h20"]) == 2
