"""A cell knows its code: an edited line refuses it, an edited docstring keeps it, plots are not asked."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab
from eval.__main__ import KINDS, main
from eval.core import digests
from eval.core.digests import OUTSIDE, code_digest, imports, method_digest, reached
from kvlab.methods import parse

ROOT = Path(__file__).resolve().parents[2]
MAKERS = sorted(
    {kind.maker for kind in KINDS if hasattr(kind, "maker")}
    | {maker for kind in KINDS for maker in getattr(kind, "makers", {}).values()}
)


APART = ("kvlab.workshop", "kvlab.reference")  # artefacts; definitions that tests and notebooks compare with


def outside(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in OUTSIDE)


@pytest.mark.parametrize("maker", MAKERS)
def test_what_makes_numbers_imports_nothing_that_cannot_change_one(maker):
    """At module level or inside functions; the list of imports names every one, so none can hide."""
    found = reached(maker)
    assert maker in found and "kvlab.layer" in found
    for name, path in found.items():
        named = [module for module in imports(name, path) if outside(module)]
        assert not named, f"{name} imports {named}"


def test_all_that_can_change_a_number_is_reached():
    """Every module of kvlab but those that only show, and every room of eval that makes numbers."""
    found = set().union(*(reached(maker) for maker in MAKERS))
    for package in ("kvlab", "eval.accuracy", "eval.speed", "eval.studies"):
        for path in ROOT.joinpath(*package.split(".")).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            apart = name.startswith(APART) or name.endswith((".measurement", ".measurements", ".__main__"))
            assert name in found or apart or outside(name), f"no measurement's digest covers {name}"


def project(tmp_path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def of(root: Path, *makers: str) -> str:
    code_digest.cache_clear()
    return code_digest(*makers, root=root)


def test_imports_are_followed_wherever_they_stand(tmp_path):
    root = project(
        tmp_path,
        lab__make="def setup():\n    from .deep import number\n    return number",
        lab__deep="import lab.other as o\nnumber = 1",
        lab__other="",
        lab__stranger="",
    )
    assert set(reached("lab.make", root=root)) == {"lab.make", "lab.deep", "lab.other"}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ('"""Other words."""\nnumber = 1  # and a comment\n', True),
        ('number = 1\n\n\ndef f():\n    """Words."""\n    return 1', False),
        ("number = 2", False),
    ],
)
def test_docstrings_and_comments_do_not_count(tmp_path, text, same):
    root = project(tmp_path, lab__make="from . import deep", lab__deep='"""Words."""\nnumber = 1')
    before = of(root, "lab.make")
    project(tmp_path, lab__deep=text)
    assert (of(root, "lab.make") == before) is same


def copied(tmp_path: Path) -> Path:
    """kvlab's and eval's sources in another folder."""
    for package in ("kvlab", "eval"):
        for path in (ROOT / package).rglob("*.py"):
            place = tmp_path / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("file", "edit", "same"),
    [
        ("kvlab/keep/h2o.py", lambda text: text.replace('"""', '"""In other words: ', 1), True),
        ("kvlab/keep/h2o.py", lambda text: text + "\nlimit = 3\n", False),
        ("kvlab/static_graph/kv_manager.py", lambda text: text + "\nlimit = 3\n", False),
        ("kvlab/link/base.py", lambda text: text + "\nlimit = 3\n", False),
        ("eval/accuracy/scoring.py", lambda text: text + "\nlimit = 3\n", False),
        ("kvlab/plots.py", lambda text: text + "\nlimit = 3\n", True),
        ("kvlab/doctor.py", lambda text: text + "\nlimit = 3\n", True),
        ("eval/report/tables.py", lambda text: text + "\nlimit = 3\n", True),
        ("eval/core/show.py", lambda text: text + "\nlimit = 3\n", True),
    ],
)
def test_an_edit_of_the_project_refuses_a_cell_or_keeps_it(tmp_path, file, edit, same):
    root = copied(tmp_path)
    before = of(root, "eval.accuracy.make")
    path = root / file
    path.write_text(edit(path.read_text()))
    assert (of(root, "eval.accuracy.make") == before) is same


def test_what_is_installed_beside_the_project_is_not_walked_through(tmp_path):
    """In an environment kvlab and eval stand beside torch: another torch is a version, no line of ours."""
    root = copied(tmp_path)
    before = of(root, "eval.accuracy.make")
    (root / "torch").mkdir()
    (root / "torch" / "__init__.py").write_text("this is no Python")
    assert of(root, "eval.accuracy.make") == before


def test_the_calibration_text_counts(tmp_path, monkeypatch):
    before = of(ROOT, "eval.accuracy.make")
    monkeypatch.setattr(digests, "CALIBRATION", tmp_path / "calibration.txt")
    (tmp_path / "calibration.txt").write_text("Other words.")
    assert of(ROOT, "eval.accuracy.make") != before
    code_digest.cache_clear()


MINE = '''"""A keep of one's own."""
from kvlab.keep import Keep


class Newest(Keep):
    """Keep the newest tokens."""

    def score(self, layer):
        return layer.slot_positions.float()
'''


def test_a_users_class_file_counts(folder, tmp_path, monkeypatch, capsys):
    """An edited docstring keeps the cells of a user's method, an edited line makes them again."""
    monkeypatch.syspath_prepend(tmp_path)
    words = (
        f"accuracy --model {folder} --limit 2 --jobs 0 --tasks recall --out {tmp_path / 'out'} --methods full"
    )
    file = tmp_path / "my_keeps.py"

    def run(text: str) -> str:
        file.write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("my_keeps", None)
        assert main([*words.split(), "--methods", "full", "my_keeps.Newest:budget=12"]) == 0
        return capsys.readouterr().err

    try:
        assert "kept" not in run(MINE)
        assert "2 of 2 accuracy cells are kept" in run(MINE.replace("the newest", "only the newest"))
        assert "1 of 2 accuracy cells are kept" in run(MINE.replace(".float()", ".float() * 1.5"))
    finally:
        sys.modules.pop("my_keeps", None)
    assert method_digest(parse("h2o:budget=0.1")) is None


def test_a_method_entered_by_the_user_counts():
    @kvlab.method("as_it_is")
    def _():
        """All of it."""
        return {}

    try:
        assert len(method_digest(parse("as_it_is"))) == 12
    finally:
        del kvlab.METHODS["as_it_is"]


def test_every_cell_carries_what_it_stands_on(tmp_path, monkeypatch):
    from eval.studies import attention

    monkeypatch.setattr(attention, "measure", lambda tokens, repeats: [])
    assert main(["speed", "--suite", "attention", "--limit", "1", "--out", str(tmp_path)]) == 0
    (cell,) = (json.loads(path.read_text()) for path in (tmp_path / "cells").glob("*.json"))
    assert cell["task"] == "attention:2048" and cell["machine"]["threads"] == 1
    assert {"python", "torch", "transformers"} <= set(cell["versions"]) and "commit" in cell
    assert set(cell["config"]) == {"code", "repeats", "threads", "tokens"}


@pytest.mark.parametrize("words", [["--help"], ["speed", "--help"], ["speed", "--tasks", "recall"], ["al"]])
def test_help_and_wrong_options_need_no_torch(words):
    code = f"""
import sys
from eval.__main__ import main
try:
    main({words})
except SystemExit:
    pass
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True).stdout
    assert printed.splitlines()[-1] == "False False"
