"""The two zips: what is in them, and that learners are handed no answer."""

import html
import io
import posixpath
import re
import stat
import zipfile
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from course import editions
from course.kit import pack
from course.teaching.check.key import FOLD

ROOT = Path(__file__).resolve().parents[3]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.skipif(not CHAPTERS, reason="no notebooks in this checkout")


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    """(learner, instructor): {path in the zip: bytes}, the wheel's files among them as wheel/..."""
    found = []
    for made in pack.write(CHAPTERS, tmp_path_factory.mktemp("kits")):
        files = contents(made.read_bytes())
        if f"{made.stem}/start.sh" in files:  # stays executable
            with zipfile.ZipFile(made) as archive:
                mode = archive.getinfo(f"{made.stem}/start.sh").external_attr >> 16
            assert stat.S_ISREG(mode) and mode & 0o111
        wheel = next(name for name in files if name.endswith(".whl"))
        found.append(files | {f"wheel/{name}": data for name, data in contents(files[wheel]).items()})
    return found


def contents(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name) for name in opened.namelist()}


def plain(text: str) -> str:
    """Without marks and line breaks, as a reader sees it."""
    return " ".join(html.unescape(re.sub(r"</?\w+>", "", text)).split())


def sentences(text: str) -> list[str]:
    return [one for one in re.split(r"(?<=[.:;?]) ", plain(text)) if len(one) > 25]


def spoken(cell) -> str:
    """What a cell's slides tell the speaker alone: what to say, and wrong answers to expect."""
    given = cell.metadata.get("slides", [])
    return "\n".join(line for slide in given for line in [slide["say"], *slide.get("wrong", [])])


def secrets() -> dict[str, str]:
    """Line -> where it stands: solutions, hints, answers, checks, and what is meant for instructors."""
    found = {}
    for path in CHAPTERS:
        shown = plain("\n".join(cell.source for cell in editions.learner(nbformat.read(path, 4)).cells))
        for cell in nbformat.read(path, as_version=4).cells:
            lines = []
            if editions.BEGIN in cell.source:
                solved = re.findall(r"### BEGIN SOLUTION\n(.*?)### (?:INSTEAD|END)", cell.source, re.S)
                given = plain(editions.open_gaps(cell.source))
                lines += [plain(line) for part in solved for line in part.splitlines()]
                lines = [line for line in lines if len(line) > 12 and line not in given]
            if "instructor" in cell.metadata.get("tags", []):
                lines += sentences(cell.source)
            lines += sentences(spoken(cell))
            for _, folded in FOLD.findall(cell.source):
                lines += [line for line in sentences(folded) if line != "Run the next cell."]
            found |= {line: f"{path.name} {cell.id}" for line in lines if line not in shown}
    for path in sorted((ROOT / "course/exercises").glob("*.py")):
        for said in re.findall(r'^ +"(.{40,}?)"[,:]', path.read_text(encoding="utf-8"), re.M):
            found[plain(said)] = path.name
    for path in sorted((ROOT / "course/exercises").glob("*.txt")):
        for said in re.findall(r"^> (.{40,})$", path.read_text(encoding="utf-8"), re.M):
            found[plain(said)] = path.name
    for path in (ROOT / "course" / "instructor").rglob("*"):
        if path.is_file() and path.suffix != ".html":  # the quiz's form, which learners get
            lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
            found |= {plain(line): path.name for line in lines if len(plain(line)) > 50}
    return found


def test_learners_are_handed_no_answer(kits):
    """No line of a solution, a hint, an answer or a note stands in a file of the zip or of its wheel."""
    lines, by_word, shown = secrets(), defaultdict(list), []
    assert len(lines) > 400
    for line in lines:  # the words inside are whole where it stands: it is looked for where the longest is
        by_word[max(line.split()[1:-1], key=len, default="")].append(line)
    for name, data in kits[0].items():
        if name.endswith((".safetensors", ".whl")):  # numbers; and the wheel, whose files are here too
            continue
        if name.endswith(".ipynb"):
            text = "\n".join(cell.source + spoken(cell) for cell in nbformat.reads(data.decode(), 4).cells)
        else:
            text = re.sub("[A-Za-z0-9+/=]{99,}", "", data.decode(errors="ignore"))  # pictures, weights
        text = plain(text)
        words = by_word.keys() & {"", *text.split()}
        shown += [(name, line, lines[line]) for word in words for line in by_word[word] if line in text]
    assert shown == []
    assert any(name.endswith("check/key.z") for name in kits[0])
    assert not [name for name in kits[0] if re.search(r"exercises/|instructor|solution", name)]


def test_both_zips_hold_what_it_takes_to_start(kits):
    for files, top in zip(kits, ("kvlab-learner", "kvlab-instructor")):
        wheel = next(name for name in files if name.endswith(".whl"))
        assert re.fullmatch(rf"{top}/setup/kvlab-[\d.]+\+[0-9a-f]{{8}}-py3-none-any.whl", wheel)
        for name in (
            "START.md",
            "page.html",
            "start.sh",
            "start.bat",
            "setup/start.py",
            "setup/requirements.txt",
        ):
            assert f"{top}/{name}" in files
        assert b"\r" not in files[f"{top}/start.sh"]
        batch = files[f"{top}/start.bat"]
        assert batch.count(b"\r\n") == batch.count(b"\n") and batch.isascii()
    for path in (ROOT / "course" / "teaching").glob("*.json"):  # what chapters show of real models
        assert any(name.endswith(f"teaching/{path.name}") for name in kits[0]), path.name
    inside = kits[1]
    for edition in ("learner", "solution", "instructor"):
        for path in CHAPTERS:
            assert f"kvlab-instructor/{edition}/{path.name}" in inside
    for name in ("TEACH.md", "instructor_guide.md", "kvlab-learner.zip", "slides/talk.html"):
        assert any(found.startswith(f"kvlab-instructor/{name}") for found in inside)
    decks = [name for name in inside if re.match(r"kvlab-instructor/slides/\d\d_\w+\.html$", name)]
    assert len(decks) >= 9  # and the live page lies once in the zip, above them
    assert b'href="../page.html#' in inside[f"kvlab-instructor/slides/{CHAPTERS[0].stem}.html"]
    assert "kvlab-instructor/slides/page.html" not in inside


def test_every_link_in_both_zips_leads_to_a_file_of_the_zip(kits):
    """Out of pages, of notebooks and of slides, pictures too."""
    dead = []
    for files in kits:
        for name, data in files.items():
            if name.endswith(".md"):
                found = re.findall(r"\]\(([^)\s]+)\)", data.decode())
            elif name.endswith(".ipynb"):
                cells = nbformat.reads(data.decode(), 4).cells
                text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
                found = re.findall(r"\]\(([^)\s]+)\)", text)
            elif "/slides/" in name:
                found = re.findall(r'(?:href|src)="([^"$]+)"', data.decode())  # $: a script's own
            else:
                continue
            for link in (link for link in found if not re.match(r"[a-z]+:|#", link)):
                if posixpath.normpath(f"{posixpath.dirname(name)}/{link.partition('#')[0]}") not in files:
                    dead.append((name, link))
    assert dead == []


def test_learners_install_the_tested_versions_and_nothing_that_no_notebook_imports():
    pins = dict(line.split("==") for line in pack._lines("constraints.txt"))
    names = []
    for line in pack.requirements():
        requirement = Requirement(line)
        names.append(requirement.name)
        assert str(requirement.specifier).removeprefix("==") in pins.values()
    assert {"torch", "transformers", "jupyterlab", "onnxruntime"} <= set(names)
    code = "\n".join(
        cell.source for path in CHAPTERS for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"
    )
    for name in pack.LEFT_OUT:
        assert name not in names
        assert not re.search(rf"^(import|from) {name.replace('-', '_')}\b", code, re.M)
