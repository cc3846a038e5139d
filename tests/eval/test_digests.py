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
from eval.accuracy import taskset
from eval.core import digests
from eval.core.digests import code_digest, method_digest
from eval.core.modules import APART, OUTSIDE, Root, imports, reached
from kvlab.finding import METHODS, PROFILED
from kvlab.spec import parse

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = sorted({kind.__module__ for kind in KINDS} - {"eval.__main__"})
MAKERS = sorted(
    {kind.maker for kind in KINDS if hasattr(kind, "maker")}
    | {maker for kind in KINDS for maker in getattr(kind, "makers", {}).values()}
)


ARTEFACTS = (
    "kvlab.workshop",
    "kvlab.reference",
)  # artefacts; definitions that tests and notebooks compare with


BESIDE = (  # makes no cell; hands cells to eval.speed.timing on a node of Ray's
    "eval.studies.clock",
    "eval.studies.harness",
    "eval.speed.apart",
)


def outside(module: str, names=OUTSIDE) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def methods_modules() -> set[str]:
    """What the entries of the table of methods lead to."""
    entries = (digests._entry(method.policies)[0] for method in (METHODS | PROFILED).values())
    return set(reached(*(name for names in entries for name in names)))


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
    found = methods_modules().union(*(reached(maker) for maker in (*MAKERS, *MEASUREMENTS)))
    assert {"eval.core.workers", "eval.core.measurement", *MEASUREMENTS} <= found
    for package in ("kvlab", "eval.accuracy", "eval.speed", "eval.studies"):
        for path in ROOT.joinpath(*package.split(".")).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            apart = name.startswith(ARTEFACTS) or name.endswith(".__main__") or outside(name, APART)
            assert name in found or apart or name in BESIDE, f"no measurement's digest covers {name}"


@pytest.mark.parametrize("module", [*MAKERS, *MEASUREMENTS])
def test_what_cannot_change_a_number_is_not_reached(module):
    assert not [name for name in reached(module) if outside(name, APART)]


@pytest.mark.parametrize("method", ["h2o", "snapkv", "infinigen", "kivi2", "padded"])
def test_a_method_stands_on_its_own_classes(method):
    """The makers reach no keep, store or fetch that only some methods use; the method's own digest does."""
    own = {"h2o": "keep.h2o", "snapkv": "keep.snapkv", "infinigen": "place.infinigen", "kivi2": "store.kivi"}
    own |= {"padded": "static_graph.kv_manager"}
    module = f"kvlab.{own[method]}"
    names, _ = digests._entry(kvlab.METHODS[method].policies)
    assert module in reached(*names)
    assert module not in reached("eval.accuracy.make", "eval.accuracy.measurement")
    others = [name for name in own if name not in (method, "padded")]
    for other in others:
        assert module not in reached(*digests._entry(kvlab.METHODS[other].policies)[0])


def test_a_method_that_names_others_stands_on_them():
    of = {text: method_digest(parse(text)) for text in ("mixed", "mixed:k=nvfp4", "mixed:v=int8")}
    assert len(set(of.values())) == 3


def test_a_method_stands_on_its_profile(tmp_path):
    """The file's content, by the table's name and by the class's."""
    file = tmp_path / "profile"
    file.write_text("one")
    specs = [parse(f"{name}:profile={file}") for name in ("duo", "kvzap", "kvlab.keep.Duo")]
    before = [method_digest(spec) for spec in specs]
    assert before == [method_digest(spec) for spec in specs] and len({*before[:2]}) == 2
    file.write_text("other")
    assert not {*before} & {method_digest(spec) for spec in specs}


def project(tmp_path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def of(root: Path, *makers: str) -> str:
    code_digest.cache_clear()
    return code_digest(*makers, root=root)


def test_names_that_a_package_passes_on_lead_to_where_they_come_from(tmp_path):
    files = {
        "__init__": "from . import parts\nfrom .parts import one",
        "parts/__init__": "from .one import one\nfrom .two import two\n__all__ = ['one', 'two']",
        "parts/one": "one = 1",
        "parts/two": "two = 2",
        "a": "from .parts import one\nprint(one)",
        "b": "import kvlab\nkvlab.parts.two",
        "c": "from . import parts\nprint(parts)",
    }
    for name, text in files.items():
        path = tmp_path / "kvlab" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    both = {"kvlab.parts.one", "kvlab.parts.two"}
    for name, expected in (("a", {"kvlab.parts.one"}), ("b", {"kvlab.parts.two"}), ("c", both)):
        assert set(reached(f"kvlab.{name}", roots=[Root(tmp_path)])) & both == expected, name


def test_imports_are_followed_wherever_they_stand(tmp_path):
    root = project(
        tmp_path,
        lab__make="def setup():\n    from .deep import number\n    return number",
        lab__deep="import lab.other as o\nnumber = 1",
        lab__other="",
        lab__stranger="",
    )
    assert set(reached("lab.make", roots=[Root(root)])) == {"lab.make", "lab.deep", "lab.other"}


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
        ("kvlab/keep/base.py", lambda text: text + "\nlimit = 3\n", False),
        ("kvlab/keep/h2o.py", lambda text: text + "\nlimit = 3\n", True),
        ("kvlab/static_graph/kv_manager.py", lambda text: text + "\nlimit = 3\n", True),
        ("kvlab/methods.py", lambda text: text + "\n@method('x')\ndef _x():\n    return {}\n", True),
        ("kvlab/methods.py", lambda text: text + "\nlimit = 3\n", False),
        ("eval/core/workers.py", lambda text: text + "\nlimit = 3\n", False),
        ("eval/core/measurement.py", lambda text: text + "\nlimit = 3\n", False),
        ("eval/accuracy/measurement.py", lambda text: text + "\nlimit = 3\n", False),
        ("kvlab/scratch.py", lambda text: text + "\nlimit = 3\n", True),
        ("eval/core/errors.py", lambda text: text + "\nlimit = 3\n", True),
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
    makers = "eval.accuracy.make", "eval.accuracy.measurement"
    before = of(root, *makers)
    path = root / file
    path.write_text(edit(path.read_text()))
    assert (of(root, *makers) == before) is same


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("kvlab/keep/h2o.py", {"h2o", "offload+h2o"}),
        ("kvlab/static_graph/kv_manager.py", {"padded"}),
        ("kvlab/place/topk.py", {"topk"}),
    ],
)
def test_an_edit_of_a_method_refuses_the_cells_of_those_that_use_it(tmp_path, file, changed):
    root = copied(tmp_path)
    methods = ("full", "h2o", "offload+h2o", "int4", "padded", "topk")

    def all_of_them() -> dict[str, str]:
        entries = {name: digests._entry(kvlab.METHODS[name].policies)[0] for name in methods}
        return {name: digests.digest(reached(*e, roots=[Root(root)]).values()) for name, e in entries.items()}

    before, text = all_of_them(), (root / file).read_text()
    (root / file).write_text(text.replace('"""', '"""In other words: ', 1))
    assert all_of_them() == before
    (root / file).write_text(text + "\nlimit = 3\n")
    assert {name for name, found in all_of_them().items() if found != before[name]} == changed


def test_an_entry_of_the_table_counts():
    """Its own lines and defaults, and nobody else's."""
    texts = {name: digests._entry(method.policies)[1] for name, method in kvlab.METHODS.items()}
    assert "0.2" in texts["topk"][0] and "TopK" in texts["topk"][0] and "H2O" not in texts["topk"][0]
    assert len({method_digest(parse(name)) for name in ("int8", "int4", "int2")}) == 3


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
    assert method_digest(parse("h2o:budget=0.1")) == method_digest(parse("h2o:budget=0.5"))


HELPED = """import importlib
from kvlab.keep import Keep
{how}


class Mine(Keep):
    def score(self, layer):
        return helper.score(layer)
"""


@pytest.mark.parametrize(
    "how",
    [
        "import helper",
        "from helper import score",
        "import helper  # noqa: for what it does",
        "helper = importlib.import_module('helper')",
        "from importlib import import_module\nhelper = import_module('helper')",
        "import elsewhere as helper",
    ],
)
def test_what_a_users_class_loads_counts(tmp_path, monkeypatch, how):
    """From beside itself, or from another place on sys.path; what these import too."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir(), other.mkdir()
    monkeypatch.syspath_prepend(other)
    monkeypatch.syspath_prepend(mine)
    (mine / "my_helped.py").write_text(HELPED.format(how=how))
    (other / "elsewhere.py").write_text("from helper import score\n")
    deep = mine / "helper.py"
    deep.write_text("def score(layer):\n    return layer.slot_positions.float()\n")
    try:
        before = method_digest(parse("my_helped.Mine:budget=12"))
        deep.write_text("def score(layer):\n    return -layer.slot_positions.float()\n")
        assert method_digest(parse("my_helped.Mine:budget=12")) != before
    finally:
        for name in ("my_helped", "helper", "elsewhere"):
            sys.modules.pop(name, None)


def test_a_class_of_kvlabs_that_a_users_class_builds_on_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_snap.py").write_text("from kvlab.keep import SnapKV\n\nclass Mine(SnapKV):\n    pass\n")
    try:
        name = parse("my_snap.Mine").name
        assert {"my_snap", "kvlab.keep.snapkv"} <= set(reached(name, roots=digests.roots_of("my_snap")))
    finally:
        sys.modules.pop("my_snap", None)


@pytest.mark.parametrize(
    "how",
    [
        "helper = importlib.import_module('hel' + 'per')",
        "helper = importlib.util.spec_from_file_location('helper', 'helper.py')",
        "exec(open('helper.py').read())",
    ],
)
def test_code_that_only_a_run_can_name_is_refused(tmp_path, monkeypatch, how, capsys, folder):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("def score(layer):\n    return layer.slot_positions.float()\n")
    (tmp_path / "my_unknown.py").write_text(HELPED.format(how=f"import importlib.util\n{how}"))
    words = f"accuracy --model {folder} --tasks recall --methods my_unknown.Mine --jobs 0 --out {tmp_path}/o"
    try:
        assert main(words.split()) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "my_unknown.py, line 4" in line and "import it by its name" in line
    finally:
        for name in ("my_unknown", "helper"):
            sys.modules.pop(name, None)


def test_a_method_entered_by_the_user_counts():
    @kvlab.method("as_it_is")
    def _():
        """All of it."""
        return {}

    try:
        assert len(method_digest(parse("as_it_is"))) == 12
    finally:
        del kvlab.METHODS["as_it_is"]


TASK = """dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
process_docs: !function rows.same
process_results: !function scores.found.correct
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc, aggregation: !function kvlab_means.mean}]
"""
ROWS = "def same(docs):\n    return docs\n"
CORRECT = "def correct(doc, results):\n    return {'acc': 1}\n"
MEAN = "from kvlab_sums import total\n\n\ndef mean(found):\n    return total(found) / len(found)\n"
SUMS = "def total(found):\n    return sum(found)\n"


@pytest.fixture
def included(tmp_path, monkeypatch):
    """{name: a file that the task `mine` stands on, of which its own folder holds the first only}."""
    files = {
        "mine/mine.yaml": "task: mine\ninclude: ../base/base.yaml\n",
        "base/base.yaml": f"include: {tmp_path}/deep/deep.yml\ndoc_to_text: x\n",
        "deep/deep.yml": TASK % (tmp_path / "rows.jsonl"),
        "deep/rows.py": ROWS,
        "deep/scores/found.py": CORRECT,
        "apart/kvlab_means.py": MEAN,
        "apart/kvlab_sums.py": SUMS,
        "rows.jsonl": json.dumps({"choices": ["a", "b"], "label": 0}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "apart")
    yield {name: tmp_path / name for name in files}
    for module in ("kvlab_means", "kvlab_sums"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("named", [True, False])
def test_what_a_users_task_stands_on_counts(included, named):
    """Wherever it is: what its YAML includes, and the modules of all their functions; whether the YAML is
    named or its folder."""
    file = included["mine/mine.yaml"]
    about = {"named": (("mine", str(file)),)} if named else {"include": (str(file.parent),)}
    found = {digests.digest(taskset.files("mine", taskset.Sources(**about)))}
    for path in included.values():
        before = path.read_text()
        path.write_text(before + {".py": "\nlimit = 3\n"}.get(path.suffix, "\n"))
        found.add(digests.digest(taskset.files("mine", taskset.Sources(**about))))
        path.write_text(before)
    assert len(found) == 1 + len(included)


def test_a_task_that_stands_in_its_folder_has_the_digest_that_it_had(included):
    """Of its folder's YAML and Python files, and of its rows: stored cells count on."""
    folder, rows = included["deep/deep.yml"].parent, included["rows.jsonl"]
    text = (TASK % rows).replace("scores.found", "rows").replace("kvlab_means.mean", "rows.mean")
    included["deep/rows.py"].write_text(f"{ROWS}{CORRECT}mean = max\n")
    (folder / "base.yaml").write_text(f"doc_to_text: x\n{text}")
    (folder / "mine.yaml").write_text("task: mine\ninclude: base.yaml\n")
    found = taskset.files("mine", taskset.Sources(include=(str(folder),)))
    assert sorted(found) == sorted([*folder.glob("*.yaml"), *folder.glob("*.py"), rows])


def test_every_cell_carries_what_it_stands_on(tmp_path, monkeypatch):
    from eval.studies import attention

    monkeypatch.setattr(attention, "measure", lambda tokens, repeats: [])
    assert main(["speed", "--suite", "attention", "--limit", "1", "--out", str(tmp_path)]) == 0
    (cell,) = (json.loads(path.read_text()) for path in (tmp_path / "cells").glob("*.json"))
    assert cell["task"] == "attention:2048" and cell["machine"]["threads"] == 1
    assert {"python", "torch", "transformers"} <= set(cell["versions"]) and "commit" in cell
    assert set(cell["config"]) == {"code", "repeats", "simd", "threads", "tokens"}


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
