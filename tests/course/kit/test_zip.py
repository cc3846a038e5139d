"""The learner's zip in an empty folder: `make test-kit`, which installs from pip's index (KVLAB_KIT=1).

An environment is made from the zip alone, in a folder named with a space and an umlaut, as a learner does:
`sh start.sh`. In it the chapters run, also from another folder; another kit's notebook says what to do.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from course.kit import pack

ROOT = Path(__file__).resolve().parents[3]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
pytestmark = [
    pytest.mark.skipif(os.environ.get("KVLAB_KIT") != "1", reason="installs packages: make test-kit"),
    pytest.mark.skipif(sys.platform == "win32", reason="start.bat starts the kit there"),
]
# Run a notebook with the kit's own Python; print what its checks say and what it ends with.
RUN = """
import json, sys, nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from pathlib import Path
path = Path(sys.argv[1])
book = nbformat.read(path, as_version=4)
ended = ""
try:
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
except CellExecutionError as error:
    ended = [out.traceback for cell in book.cells for out in cell.get("outputs", []) if "traceback" in out][0]
texts = [(o.get("name"), o.get("text", "")) for c in book.cells for o in c.get("outputs", [])]
print(json.dumps({"ended": ended, "texts": texts}))
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """The folder of a learner who has unpacked the zip and started once."""
    folder = tmp_path_factory.mktemp("kit") / "Meine Übung"
    learner, _ = pack.write(CHAPTERS, folder)
    made = folder / "kvlab-learner"
    with zipfile.ZipFile(learner) as archive:
        archive.extractall(folder)
    set_up = shell(made, "--set-up")
    assert set_up.returncode == 0, set_up.stdout + set_up.stderr
    assert (
        "4 of 4" in set_up.stdout and "[ok] workshop model" in set_up.stdout and "[!!]" not in set_up.stdout
    )
    assert "Warning" not in set_up.stdout + set_up.stderr and ".py:" not in set_up.stdout + set_up.stderr
    return made


def clean(*more: str) -> dict[str, str]:
    """The environment without anything of this project's, and without what begins with one of these."""
    ours = ("PYTHON", "VIRTUAL_ENV", *more)
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def shell(folder, *arguments):
    """start.sh, as a learner starts it."""
    return subprocess.run(
        ["/bin/sh", str(folder / "start.sh"), *arguments], capture_output=True, text=True, cwd="/",
        env=clean("HF_") | {"PYTHON": sys.executable},
    )  # fmt: skip


def run(kit, notebook):
    """{"ended": the error's lines, "texts": [stream, text] of every output}"""
    ran = subprocess.run(
        [str(kit / ".venv/bin/python"), "-c", RUN, str(notebook)], capture_output=True, text=True, cwd="/",
        env=clean(),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("chapter, elsewhere", [("03_static_buffers", False), ("04_quantization", True)])
def test_a_chapter_runs_in_an_environment_made_from_the_zip_alone(kit, tmp_path, chapter, elsewhere):
    """3 needs ONNX; 4, here from another folder, decodes packed caches without numba. No line on stderr."""
    book = kit / "notebooks" / f"{chapter}.ipynb"
    told = run(kit, shutil.copy(book, tmp_path / "elsewhere.ipynb") if elsewhere else book)
    assert told["ended"] == "" and not [text for name, text in told["texts"] if name == "stderr"]
    assert sum(text.startswith("not attempted") for _, text in told["texts"]) >= 4


def test_what_chapters_tell_learners_to_type_works_on_the_command_line_of_the_kit(kit):
    """Typed as they stand there; what needs --all says so in one line."""
    told = typed(
        kit,
        "kvlab doctor",
        "kvlab fetch smollm3",
        "python -m kvlab_course smollm2 nothing",
        "kvlab eval accuracy --methods full --limit 1",
        "python -c 'import gguf, accelerate'",
    )
    assert "not found" not in told and "Traceback" not in told and "No module named" not in told
    assert "[!!]" not in told and "Warning" not in told and "did you mean smollm2?" in told
    assert "no study is called 'nothing'" in told
    assert "error: lm-eval is not installed: chapter 8 scores with it; `sh start.sh --all`" in told
    assert "[??] lm-eval is not installed" in shell(kit, "--check").stdout


def typed(kit, *lines):
    """What the command line of a kit says to these lines, on both streams."""
    ran = subprocess.run(
        ["/bin/sh", str(kit / "start.sh"), "--shell"], input="\n".join(lines) + "\n", text=True, cwd="/",
        env=clean() | {"SHELL": "/bin/sh"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return ran.stdout


def test_a_damaged_installation_is_mended_and_a_class_is_tabulated(kit):
    """The line of quiz.md, as it stands there, in the folder of an instructor."""
    (key,) = kit.glob(".venv/lib/python3*/site-packages/kvlab_course/teaching/check/key.z")
    key.unlink()
    assert "it is mended" in shell(kit, "--set-up").stdout and key.exists()
    with zipfile.ZipFile(kit.parent / "kvlab-instructor.zip") as archive:
        text = archive.read("kvlab-instructor/classroom/quiz.md").decode()
        (kit / "classroom").mkdir()
        (kit / "classroom" / "quiz.md").write_text(text, encoding="utf-8")
    (line,) = re.findall(r"(?m)^    (\.venv/bin/python .*)$", text)
    sheets = re.findall(r"(?m)^    ((?:name|Ada),.*)$", text)
    (kit / "class.csv").write_text("\n".join(sheets) + "\n", encoding="utf-8")
    ran = subprocess.run(line, shell=True, cwd=kit, env=clean(), capture_output=True, text=True)
    assert ran.returncode == 0 and "| 1. Without a cache | 0 of 1 | 1 of 1 |" in ran.stdout, ran.stderr
    assert (kit / "answers.png").read_bytes().startswith(b"\x89PNG")
