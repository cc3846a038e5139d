"""Pack the kits: kvlab-learner.zip and kvlab-instructor.zip, each with a wheel and what sets it up.

    kvlab-learner/                        kvlab-instructor/
      START.md, start.sh, start.bat         the same, and TEACH.md
      page.html    the live page            the same
      notebooks/   the learner edition      learner/, solution/, instructor/   the three editions
      source/      kvlab, to read           slides/, the guide, classroom/ (course/instructor)
      setup/       start.py, the wheel,     source/, setup/
                   requirements             kvlab-learner.zip   to hand out

The wheel's version ends in the kit's digest, `0.1.0+1a2b3c4d`. Every notebook of a kit knows it, so that one
opened beside another kit's wheel says so in its first cell.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import nbformat
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .. import clock, editions, slides
from ..page.build import built
from ..text import SETUP

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CPU = "https://download.pytorch.org/whl/cpu"
# What learners get when they ask: lm-eval and its data, 140 MB, with which chapter 8 alone scores methods.
# What they do without: numba, 64 MB, makes packed caches faster (kvlab decodes them in plain torch then).
# What comes beside the chapters' packages: gguf, accelerate, 0.5 MB; `kvlab fetch smollm2` reads with them.
ON_REQUEST = ("lm-eval", "datasets", "pandas")
LEFT_OUT = (*ON_REQUEST, "numba")
WITH = ("course", "gguf", "eval")
SCORES = re.compile(r"^from eval\.(?:accuracy|core|report)\b", re.M)  # a notebook that needs lm-eval
BUILT_FROM = ("kvlab", "eval", "course", "pyproject.toml", "setup.py", "LICENSE")
READ_ME = "kvlab, as the workshop hands it out. Start with START.md.\n"  # the project's own shows a solution
LITTER = shutil.ignore_patterns("__pycache__", "*.pyc", ".ipynb_checkpoints")
READ = re.compile(r"\]\(\.\./((?:kvlab|eval|docs)/[^)#]+)")  # a link out of notebooks/
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#)([^)\s#]+)[^)\s]*\)")  # to a file
OUT = re.compile(r'href="\.\./((?:kvlab|eval|docs)/[^"]+)"')  # a link out of the slides
PAGE = re.compile(r"\[([^\]]+)\]\(([\w./-]+\.md)[^)]*\)")  # a link from a page to another one of the project
FIRST_CELL = """\
# Run this cell first. Where start.sh or start.bat set kvlab up it does nothing, elsewhere it installs it.
import glob
import importlib.util
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in this course needs a network
if importlib.util.find_spec("kvlab") is None:
    wheel = "kvlab-{version}-py3-none-any.whl"
    found = [os.environ.get("KVLAB_SOURCE"), *glob.glob(wheel), *glob.glob("../setup/" + wheel)]
    if not any(found):
        Stop = type("Stop", (Exception,), {{"_render_traceback_": lambda self: [str(self)]}})
        raise Stop("kvlab is not in this Python: open the notebook with start.sh or start.bat. "
                   f"On Colab: upload setup/{{wheel}} and run this cell again.")
    source = next(filter(None, found))
    %pip install -q "{{source}}[course]"
for name in ("course", "eval"):  # their names in the project
    sys.modules[name] = importlib.import_module(f"kvlab_{{name}}")
from course.teaching import kit

kit.belongs("{version}"{needs})"""
CLASSROOM = (  # here, and in a kit, whose wheel holds no quiz
    "python -m course answers class.csv",
    ".venv/bin/python -m kvlab_course answers class.csv --quiz classroom/quiz.md",
)
COMMANDS = (("python -m eval", "kvlab eval"), ("python -m course", "python -m kvlab_course"))  # with a wheel
GUIDES = ("instructor_guide.md", "glossary.md", "troubleshooting.md", "sources.md")
REWORDED = (
    CLASSROOM,
    ("python -m course board", ".venv/bin/python -m kvlab_course board"),
    (
        ": `python -m course agenda`\nmakes this page, and a test compares.",
        ".",
    ),
    (
        "`python -m course slides` writes the deck in this\norder, `build/slides/talk.html`.",
        "The deck in this order is\n`slides/talk.html`.",
    ),
)


def write(paths: list[Path], out: Path) -> list[Path]:
    """Write both zips to `out`, from the notebooks at `paths`, and return their paths.

    ValueError where the wheel cannot be built.
    """
    books = {path.name: nbformat.read(path, as_version=4) for path in paths}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        setup = Path(folder) / "setup"
        version = _setup(setup, books)
        learner, instructor = Path(folder) / "kvlab-learner", Path(folder) / "kvlab-instructor"
        _frame(learner, setup, books)
        _edition(learner / "notebooks", books, editions.learner, version)
        made = [_zip(learner, out)]
        _frame(instructor, setup, books)
        shutil.copy(made[0], instructor)
        for name, change in (
            ("learner", editions.learner), ("solution", copy.deepcopy), ("instructor", clock.instructor),
        ):  # fmt: skip
            _edition(instructor / name, books, change, version)
        for made_of in slides.write(paths, instructor / "slides", live="../page.html"):
            shown = made_of.read_text(encoding="utf-8")
            made_of.write_text(OUT.sub(r'href="../source/\1"', shown), encoding="utf-8")
        _for_instructors(instructor)
        return [*made, _zip(instructor, out)]


def requirements(on_request: bool = False) -> list[str]:
    """What learners install beside kvlab, or on request, in the versions that were tested."""
    pinned = [line.split("==") for line in _lines("constraints.txt")]
    pins = {canonicalize_name(name): pin for name, pin in pinned}
    found = []
    for name, one in wanted(*WITH).items():
        if (name in ON_REQUEST) if on_request else (name not in LEFT_OUT):
            extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
            found.append(f"{name}{extras}=={pins[name]}")
    return found


def wanted(*extras: str) -> dict[str, Requirement]:
    """{name: requirement} of kvlab with these extras, whose own extras of kvlab are followed."""
    found, more = {}, _project()["optional-dependencies"]
    lines = [*_project()["dependencies"], *(line for extra in extras for line in more[extra])]
    for one in map(Requirement, lines):
        found |= wanted(*sorted(one.extras)) if one.name == "kvlab" else {canonicalize_name(one.name): one}
    return found


def scores(book) -> bool:
    """Whether a notebook needs lm-eval, which a kit brings on request."""
    return any(cell.cell_type == "code" and SCORES.search(cell.source) for cell in book.cells)


def torch_requirements() -> list[str]:
    """The CPU build of PyTorch on every system; on Linux it has a version and an index of its own."""
    torch = next(line for line in _lines("constraints.txt") if line.startswith("torch=="))
    return [
        "# The CPU build of PyTorch. On Linux its version is one of its own (+cpu), so that CUDA never comes",
        "# unasked; on macOS and Windows it is the plain one.",
        "#     pip install --no-deps -r requirements-torch.txt     and then",
        "#     pip install -c constraints.txt -r requirements.txt",
        f"--extra-index-url {CPU}",
        f'{torch}+cpu ; sys_platform == "linux"',
        f'{torch} ; sys_platform != "linux"',
    ]


def _lines(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _setup(folder: Path, books: dict) -> str:
    """Make the folder `setup` of both kits; returns the version of its wheel."""
    folder.mkdir()
    (folder / "requirements-torch.txt").write_text("\n".join(torch_requirements()) + "\n", encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n", encoding="utf-8")
    (folder / "requirements-all.txt").write_text("\n".join(requirements(True)) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "constraints.txt", folder)
    shutil.copy(HERE / "start.py", folder)
    version = _wheel(folder, books)
    (folder / "version.txt").write_text(version + "\n", encoding="utf-8")
    return version


def _wheel(folder: Path, books: dict) -> str:
    """Build the wheel into `folder`, from a copy: what an earlier build left behind must not get into it."""
    with tempfile.TemporaryDirectory() as copied:
        for name in BUILT_FROM:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(copied) / name, ignore=LITTER)
            else:
                shutil.copy(ROOT / name, copied)
        (Path(copied) / "README.md").write_text(READ_ME, encoding="utf-8")
        digest = hashlib.sha256("".join(map(nbformat.writes, books.values())).encode())
        for path in sorted(path for path in Path(copied).rglob("*") if path.is_file()):
            digest.update(str(path.relative_to(copied)).encode() + path.read_bytes())
        version = f"{_project()['version']}+{digest.hexdigest()[:8]}"
        settings = Path(copied) / "pyproject.toml"
        settings.write_text(
            re.sub(r'^version = ".*"', f'version = "{version}"', settings.read_text("utf-8"), flags=re.M),
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), copied]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            said = built.stderr.strip().splitlines() or ["pip wheel failed"]
            raise ValueError(f"the wheel could not be built: {said[-1]}")
    return version


def _frame(folder: Path, setup: Path, books: dict) -> None:
    """What both kits have: how to start, the set-up, and the files that the notebooks point to."""
    folder.mkdir()
    shutil.copytree(setup, folder / "setup")
    shutil.copy(HERE / "START.md", folder)
    shutil.copy(HERE / "start.sh", folder)
    (folder / "start.sh").chmod(0o755)
    shutil.copy(built(), folder)
    batch = (HERE / "start.bat").read_text(encoding="ascii")
    (folder / "start.bat").write_bytes(batch.replace("\n", "\r\n").encode("ascii"))
    wanted = {name for book in books.values() for cell in book.cells for name in READ.findall(cell.source)}
    for name in sorted({*wanted, *(str(p.relative_to(ROOT)) for p in (ROOT / "kvlab").rglob("*.py"))}):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    for page in sorted((folder / "source").rglob("*.md")):
        _close(page, folder / "source")


def _close(page: Path, source: Path) -> None:
    """Bring a page's pictures into `source`; of its links to what a kit does not have, the words stay."""

    def kept(link: re.Match) -> str:
        sign, words, to = link.groups()
        name = (page.parent / to).resolve().relative_to(source.resolve().parent)
        here, there = source.parent / name, ROOT / name.relative_to(source.name)
        if sign and there.is_file():
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there, here)
        return link[0] if here.is_file() else words

    page.write_text(LINK.sub(kept, page.read_text(encoding="utf-8")), encoding="utf-8")


def _edition(folder: Path, books: dict, change, version: str) -> None:
    """Write one edition: each notebook with the kit's first cell, its links into the folder `source`."""
    folder.mkdir()
    for name, book in books.items():
        made = change(book)
        needs = ', "lm_eval"' if scores(book) else ""
        for cell in made.cells:
            if cell.cell_type == "markdown":
                cell.source = READ.sub(r"](../source/\1", cell.source).replace(
                    "](page.html)", "](../page.html)"
                )
                for here, there in COMMANDS:
                    cell.source = cell.source.replace(here, there)
            elif cell.source == SETUP:
                cell.source = FIRST_CELL.format(version=version, needs=needs)
        text = nbformat.writes(made).replace(
            r"=\"page.html#", r"=\"../page.html#"
        )  # in what cells have shown
        (folder / name).write_text(text + "\n", encoding="utf-8")
    shutil.copytree(editions.DRAWINGS, folder / editions.DRAWINGS.name)


def _for_instructors(folder: Path) -> None:
    """The guide and its pages, and `classroom`: agendas, a talk, a checklist of the room, questions."""
    shutil.copy(HERE / "TEACH.md", folder)
    for name in GUIDES:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        page = PAGE.sub(lambda link: link[0] if link[2] in GUIDES else link[1], page)
        page = page.replace("](../kvlab/", "](source/kvlab/")
        for here, there in (*REWORDED, *COMMANDS):
            page = page.replace(here, there)
        (folder / name).write_text(page, encoding="utf-8")
        for picture in re.findall(r"\]\((figures/[\w.-]+)\)", page):
            (folder / "figures").mkdir(exist_ok=True)
            shutil.copy(ROOT / "docs" / picture, folder / picture)
    (folder / "classroom").mkdir()
    for name in (
        "agenda.md",
        "form.html",
        "helpers.md",
        "mistakes.md",
        "quiz.md",
        "room.md",
        "sheet.md",
        "talk.md",
    ):
        page = (ROOT / "course" / "instructor" / name).read_text(encoding="utf-8")
        for here, there in REWORDED:
            page = page.replace(here, there)
        (folder / "classroom" / name).write_text(page, encoding="utf-8")


def _zip(folder: Path, out: Path) -> Path:
    """Zip a folder under its own name, the same bytes for the same files."""
    made = out / f"{folder.name}.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(str(path.relative_to(folder.parent)), (2026, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | (path.stat().st_mode & 0o777)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return made
