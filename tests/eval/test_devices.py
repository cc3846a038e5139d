"""A pool of devices, and shards in one folder, make what one run makes."""

import pytest

from eval.command import main
from eval.core.results import Store


@pytest.fixture
def words(folder, no_pictures):
    """Words of a run of four cells; two processes, or shards, take a task each."""
    found = ["accuracy", "--model", str(folder), "--limit", "1", "--tasks", "recall", "chain"]
    return [*found, "--methods", "full", "h2o:budget=0.5", "--out"]


def numbers(out) -> dict:
    """What the cells found, and under which configuration."""
    kept = ("metrics", "values", "bytes", "config")
    return {(c["task"], c["method"]): [c[name] for name in kept] for c in Store(out).records()}


def test_a_process_on_each_device(words, tmp_path):
    assert main([*words, str(tmp_path / "one"), "--device", "cpu", "--jobs", "0"]) == 0
    assert main([*words, str(tmp_path / "two"), "--device", "cpu,cpu"]) == 0
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert one == two and len(one) == 4
    assert main([*words, str(tmp_path / "alone"), "--device", "cpu,cpu", "--tasks", "recall"]) == 0
    alone = numbers(tmp_path / "alone")  # one task, whose methods are spread
    for place, (metrics, *_, config) in alone.items():
        assert metrics[0]["value"] == one[place][0][0]["value"] and config == one[place][-1]
    assert len(alone) == 2


def test_shards_share_a_folder(words, tmp_path, capsys):
    for shard in ("2/2", "1/2"):
        assert main([*words, str(tmp_path / "shards"), "--jobs", "0", "--shard", shard]) == 0
    assert main([*words, str(tmp_path / "one"), "--jobs", "0"]) == 0
    assert numbers(tmp_path / "shards") == numbers(tmp_path / "one")
    capsys.readouterr()
    assert main([*words, str(tmp_path / "shards"), "--jobs", "0"]) == 0
    assert "4 of 4 accuracy cells are kept" in capsys.readouterr().err
