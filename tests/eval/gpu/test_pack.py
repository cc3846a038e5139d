"""What an unconnected machine is handed, and that it runs there."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from eval.core.errors import Problem
from eval.gpu import pack, unpack

ROOT = Path(__file__).parents[3]


def test_a_pack_runs_elsewhere(tmp_path, monkeypatch):
    """Unpacked and started in an empty folder, with nothing of this checkout on the path."""

    def fetched(name, into):
        raise Problem("no network in tests")

    monkeypatch.setattr(pack, "fetched", fetched)
    folder = tmp_path / "pack"
    said = pack.pack(folder, kernels=False)
    assert "transformers: not packed: no network in tests" in said
    assert pack.size_of(folder) < pack.LIMIT and said[-1].endswith("there: bash pack/run")
    (wheel,) = (folder / "site").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"kvlab/fast/gpu.py", "eval/gpu/right.py", "eval/tasks/corpus.py"} <= set(names)
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]
    away = tmp_path / "away"
    away.mkdir()
    (tmp_path / "tmp").mkdir()
    own = {"PYTHON": sys.executable, "TMPDIR": str(tmp_path / "tmp")}
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own
    words = ["bash", str(folder / "run"), "--dry", "--stages", "link"]
    done = subprocess.run(words, cwd=away, env=plain, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((away / "gpu-results" / "gpu.json").read_text())
    assert list(found["units"]) == ["link:copies"]
    assert found["machine"]["commit"] == (folder / "commit.txt").read_text().strip()
    (scratch,) = (tmp_path / "tmp").glob("kvlab-pack-*")
    assert (scratch / "kvlab" / "eval").is_dir()
    without = plain | {"PYTHON": "/usr/bin/env python-that-is-not-there"}
    assert subprocess.run(words, cwd=away, env=without, capture_output=True).returncode == 2


def test_packed_kernels_are_found_where_they_are_unpacked(tmp_path):
    """Triton's lists of files hold whole paths, which are another machine's."""
    place = tmp_path / "made" / "ABC"
    place.mkdir(parents=True)
    for name in ("_attend.cubin", "_attend.json"):
        (place / name).write_text("{}")
    (place / "__grp___attend.json").write_text('{"child_paths": {"_attend.cubin": "/gone/_attend.cubin"}}')
    with tarfile.open(tmp_path / "triton.tar.xz", "w:xz") as file:
        file.add(place, "ABC")
    unpack.kernels(tmp_path / "triton.tar.xz", tmp_path / "there")
    there = tmp_path / "there" / "ABC"
    found = json.loads((there / "__grp___attend.json").read_text())["child_paths"]
    assert found == {name: str(there / name) for name in ("_attend.cubin", "_attend.json")}
