"""What a stored number stands on: the code that makes numbers, classes of one's own, profiles, models."""

import functools
import shutil
import sys
from pathlib import Path

import pytest

from eval.core import digests
from eval.core.digests import HARNESS, MAKES, ROOT, code_digest, imported, method_digest
from kvlab.spec import parse

OWN = '''"""A keep of one's own."""
from kvlab.keep import Sinks


class Mine(Sinks):
    """Keep the newest tokens."""
'''


@pytest.fixture(autouse=True, scope="module")
def parsed_once():
    """A file that is as it was before is not parsed again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "syntax", functools.cache(digests.syntax))
        yield


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """The code that makes numbers, in another folder."""
    root = tmp_path_factory.mktemp("project")
    for room in ("kvlab", *(f"eval/{room}" for room in MAKES)):
        shutil.copytree(
            ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
        )
    return root


def of(root: Path) -> str:
    code_digest.cache_clear()
    return code_digest(root / HARNESS.name)


@pytest.fixture(scope="module")
def before(copied) -> str:
    return of(copied)


@pytest.mark.parametrize(
    ("file", "same"),
    [
        ("kvlab/keep/h2o.py", False), ("kvlab/store/int.py", False), ("eval/accuracy/scoring.py", False),
        ("eval/speed/timing.py", False), ("eval/tasks/corpus.py", False),
        ("kvlab/workshop/calibration.txt", False), ("kvlab/workshop/CARD.md", True),
    ],
)  # fmt: skip
def test_an_edit_of_what_makes_numbers_is_noticed(copied, before, file, same):
    path = copied / file
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "\nlimit = 3\n", encoding="utf-8")
    assert (of(copied) == before) is same
    path.write_text(text, encoding="utf-8")


def test_comments_docstrings_and_the_folder_change_no_number(copied, before):
    path = copied / "kvlab/keep/h2o.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"""', '"""In other words: ', 1) + "\n# a comment\n", encoding="utf-8")
    assert of(copied) == before == of(ROOT)
    path.write_text(text, encoding="utf-8")


def test_a_method_of_kvlab_has_no_digest_of_its_own():
    assert {method_digest(parse(spec)) for spec in ("full", "h2o:budget=0.2", "adakv:of=keydiff")} == {None}


def test_a_class_of_ones_own_has_one(tmp_path, monkeypatch):
    """By its name, as the method that another stands on, and with what it is made from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "theirs.py").write_text("from mine import Mine\n\n\nclass Other(Mine):\n    pass\n")
    specs = "mine.Mine", "adakv:of=mine.Mine", "theirs.Other"
    before = [method_digest(parse(spec)) for spec in specs]
    assert None not in before
    (tmp_path / "mine.py").write_text(OWN.replace("Keep the", "It keeps the"))
    assert [method_digest(parse(spec)) for spec in specs] == before
    (tmp_path / "mine.py").write_text(OWN + "    limit = 3\n")
    after = [method_digest(parse(spec)) for spec in specs]
    for name in ("mine", "theirs"):
        sys.modules.pop(name, None)
    assert not {*before} & {*after}


def test_a_class_stands_on_what_its_module_imports_from_beside_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    for where, module in (("", "flat"), ("package/", "package.inner")):
        start = f"from {'.' if where else ''}helper import size\n"
        (tmp_path / f"{module.replace('.', '/')}.py").write_text(start + OWN)
        (tmp_path / f"{where}helper.py").write_text(f"{start.replace('helper', 'other')}")
        (tmp_path / f"{where}other.py").write_text("size = 1\n")
        before = method_digest(parse(f"{module}.Mine"))
        assert before == method_digest(parse(f"{module}.Mine"))
        (tmp_path / f"{where}other.py").write_text("size = 2\n")
        assert before != method_digest(parse(f"{module}.Mine"))
    for name in ("flat", "helper", "other", "package", "package.inner", "package.helper", "package.other"):
        sys.modules.pop(name, None)


def test_of_what_is_no_file_of_python_nothing_is_imported(tmp_path):
    for name, content in (("a.so", b"\0\1"), ("b.py", b"def ("), ("c.py", b"# coding: nothing\nimport os\n")):
        (tmp_path / name).write_bytes(content)
        assert imported(tmp_path / name) == set()


def test_a_method_stands_on_its_profile(tmp_path):
    """The file's content, by the table's name and by the class's."""
    file = tmp_path / "profile"
    file.write_text("one")
    specs = [parse(f"{name}:profile={file}") for name in ("duo", "kvzap", "kvlab.keep.Duo")]
    before = [method_digest(spec) for spec in specs]
    assert None not in before
    file.write_text("other")
    assert not {*before} & {method_digest(spec) for spec in specs}
