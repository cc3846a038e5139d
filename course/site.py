"""The sources of the static site: the chapters, what they link to, the API reference and the pages that have
no others around them. Jupyter Book turns them into HTML (`make site`); nothing is executed.

A page's relative links are followed: a linked Markdown file or notebook becomes a page, any other text file a
page that shows it, an HTML file or picture is copied. A broken link is an error.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import posixpath
import re
import shutil
import sys
import textwrap
import tomllib
from pathlib import Path
from urllib.parse import quote

import nbformat
import yaml
from nbformat.v4 import new_markdown_cell

from .editions import solved
from .mathml import formulas
from .page.build import built

ROOT = Path(__file__).resolve().parents[1]
COPIED = {".html", ".png", ".svg", ".jpg"}
# What is code stays; else a link, or a picture, whose words may hold code.
PARTS = re.compile(
    r"(?P<code>```.*?```|~~~.*?~~~)|(?P<sign>!?)\[(?P<words>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<to>[^)\s]+)\)|`[^`\n]*`",
    re.S,
)
GUIDES = ("docs/instructor_guide.md", "docs/glossary.md", "docs/sources.md", "docs/troubleshooting.md")
ABOUT = ("docs/use.md", "docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md", "kvlab/workshop/CARD.md")
PACKAGES = ("kvlab", "eval")
LIVE, STORY = "notebooks/page.html", "notebooks/drawings/story.svg"  # what runs: it is copied as it is
MOVING = '<object class="story" type="image/svg+xml" data="{}" aria-label="{}"></object>'
ORPHAN = "---\norphan: true\n---\n\n"

CONFIG = {
    "title": "kvlab",
    "author": "The kvlab authors",
    "execute": {"execute_notebooks": "off"},
    "only_build_toc_files": False,
    "html": {"use_repository_button": False, "use_issues_button": False, "use_edit_page_button": False},
    "parse": {"myst_enable_extensions": ["html_image"]},  # dollars are dollars: formulas are MathML here
    "sphinx": {
        "config": {  # without Jupyter Book's sphinx_thebe: it points at a server, and breaks when added twice
            "extensions": [
                "sphinx_togglebutton",
                "sphinx_copybutton",
                "sphinx_comments",
                "myst_nb",
                "jupyter_book",
                "sphinx_external_toc",
                "sphinx_book_theme",
            ],
            "html_context": {"default_mode": "auto"},  # as the reader's machine has it, until they choose
            "html_extra_path": ["../extra"],
            "html_static_path": ["../static"],
            "html_css_files": ["site.css"],
            "html_js_files": ["site.js"],
            "myst_heading_anchors": 4,
            "html_show_sourcelink": False,
        }
    },
}
STEPS = range(40, 155, 5)  # widths of code and outputs that the style knows, in characters


def style() -> str:
    """The site's CSS, with one rule for every width of code and of outputs."""
    rules = [
        f".tag_{tag}-{n} .{part} {{ --cols: {n}; }}"
        for tag, part in (("code", "cell_input pre"), ("output", "cell_output pre"))
        for n in STEPS
    ]
    return (ROOT / "course" / "site.css").read_text(encoding="utf-8").replace("COLUMNS", "\n".join(rules))


def columns(lines: list[str]) -> int:
    """The width that these lines need, as one of STEPS."""
    longest = max(map(len, lines), default=0)
    return next((step for step in STEPS if step >= longest), STEPS[-1])


def in_columns(line: str) -> bool:
    """Is this printed line a row of a table? A line without a gap between words is a sentence, and may be
    wrapped."""
    return re.search(r"\S {2,}\S", line) is not None


def squeeze(text: str) -> str:
    """Printed text with narrower tables: where every row has more than two blanks, two are kept."""
    made = []
    for table, lines in itertools.groupby(text.splitlines(), in_columns):
        rows = list(lines)
        if table:
            width = max(map(len, rows))
            rows = [row.ljust(width) for row in rows]
            blank = [all(row[i] == " " for row in rows) for i in range(width)]
            stay = [i for i in range(width) if not all(blank[max(0, i - 2) : i + 1]) or i < 2]
            rows = ["".join(row[i] for i in stay).rstrip() for row in rows]
        made += rows
    return "\n".join(made) + "\n" * text.endswith("\n")


def wrap(text: str, width: int) -> str:
    """Printed text with sentences wrapped at a width; rows of tables are not changed."""
    made = []
    for line in text.splitlines():
        if in_columns(line) or len(line) <= width:
            made.append(line)
        else:
            indent = " " * (len(line) - len(line.lstrip()))
            made += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(made) + "\n" * text.endswith("\n")


def fit(cell) -> None:
    """Narrow the tables that a cell has printed, wrap the sentences beside them at the tables' width, and add
    tags from which the style knows the width of outputs and code."""
    printed = [output for output in cell.outputs if output.output_type == "stream"]
    tables = []
    for output in printed:
        output.text = squeeze(output.text)
        tables += filter(in_columns, output.text.splitlines())
    tags = [f"code-{columns(cell.source.splitlines())}", f"output-{columns(tables)}"]
    if tables:
        for output in printed:
            output.text = wrap(output.text, max(STEPS[0], *map(len, tables)))
    else:
        tags.append("output-prose")
    cell.metadata["tags"] = cell.metadata.get("tags", []) + tags


def write(out: Path, report: Path | None = None) -> Path:
    """Write the sources under `out` and return their folder. report: the harness's report.html, if there is
    one. Raises ValueError for a broken link."""
    shutil.rmtree(out, ignore_errors=True)
    built()
    pages = Pages(out)
    chapters = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    guides = [name for name in GUIDES if (ROOT / name).exists()]
    for name in ("README.md", *chapters, *guides, *ABOUT, LIVE, STORY):
        pages.add(name)
    pages.finish()
    pages.text("index.md", (ROOT / "course" / "welcome.md").read_text(encoding="utf-8"))
    pages.text("report.md", report_page(report, out / "extra"))
    toc = {"format": "jb-book", "root": "index", "parts": []}
    for caption, names in (
        ("The course", chapters),
        ("For the workshop", guides),
        ("The laboratory", ["README.md", "report", *ABOUT]),
        ("Reference", []),
    ):
        toc["parts"].append({"caption": caption, "chapters": [{"file": stem(name)} for name in names]})
    for package in PACKAGES:
        modules = [module for module in walk(package) if members(module)]
        for module in modules:
            pages.text(f"api/{module.__name__}.md", module_page(module))
        links = "\n".join(f"- [{m.__name__}]({m.__name__}.md): {first_line(m)}" for m in modules)
        pages.text(f"api/index_{package}.md", f"# The package {package}\n\n{links}\n")
        sections = [{"file": f"api/{module.__name__}"} for module in modules]
        toc["parts"][-1]["chapters"].append({"file": f"api/index_{package}", "sections": sections})
    toc["parts"] = [part for part in toc["parts"] if part["chapters"]]
    for name, value in (("_config.yml", CONFIG), ("_toc.yml", toc)):
        pages.text(name, yaml.safe_dump(value, sort_keys=False))
    pages.text("../static/site.css", style())
    shutil.copy(ROOT / "course" / "site.js", out / "static")
    return pages.source


def stem(name: str) -> str:
    """`docs/glossary.md` -> `docs/glossary`, the name Sphinx gives the page."""
    return re.sub(r"\.(md|ipynb)$", "", name)


class Pages:
    """Writes pages, and every file of the project that they link to, each once."""

    def __init__(self, out: Path):
        self.source, self.extra = out / "source", out / "extra"
        self.wanted: list[str] = []

    def add(self, name: str) -> None:
        if name not in self.wanted:
            self.wanted.append(name)

    def finish(self) -> None:
        for name in self.wanted:  # grows while we go
            self._write(name)

    def text(self, name: str, text: str) -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _write(self, name: str) -> None:
        path, kind = ROOT / name, Path(name).suffix
        if kind in COPIED:
            target = (self.extra if name == STORY or kind == ".html" else self.source) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        elif kind == ".ipynb":
            notebook = nbformat.read(path, as_version=4)
            notebook.cells = [c for c in notebook.cells if "instructor" not in c.metadata.get("tags", [])]
            for cell in notebook.cells:
                cell.metadata.pop("slides", None)  # with what the speaker says
                if cell.cell_type == "markdown":
                    cell.source = self._markdown(cell.source, name)
                else:
                    cell.source = solved(cell.source)
                    fit(cell)
            if line := elsewhere(name):
                notebook.cells.insert(1, new_markdown_cell(line, id="elsewhere"))
            self.text(name, nbformat.writes(notebook))
        elif kind == ".md":
            self.text(name, ORPHAN + self._markdown(path.read_text(encoding="utf-8"), name))
        else:  # a page that shows the file
            language = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml"}.get(kind, "text")
            body = path.read_text(encoding="utf-8")
            fence = "`" * 6
            self.text(f"{name}.md", f"{ORPHAN}# {name}\n\n{fence}{language}\n{body}\n{fence}\n")

    def _markdown(self, text: str, page: str) -> str:
        return PARTS.sub(lambda found: self._link(found, page) if found["to"] else found[0], formulas(text))

    def _link(self, found: re.Match, page: str) -> str:
        sign, words, target = found["sign"], found["words"], found["to"]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        place, hash, anchor = target.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), place))
        if not (ROOT / name).is_file():
            raise ValueError(f"{page}: the link to {target} leads nowhere")
        self.add(name)
        if name == STORY or name.endswith(".html"):
            return MOVING.format(target, words) if sign else f'<a href="{target}">{words}</a>'
        if Path(name).suffix not in COPIED | {".md", ".ipynb"}:
            place += ".md"
        return f"{sign}[{words}]({place}{hash}{anchor})"


def elsewhere(name: str) -> str:
    """A line that says where a chapter runs without an installation. It is empty until pyproject.toml names a
    repository on GitHub (`Repository` in `[project.urls]`)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "").rstrip("/")
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", address)
    if not found:
        return ""
    binder = f"https://mybinder.org/v2/gh/{found[1]}/HEAD?labpath={quote(name, safe='')}"
    colab = f"https://colab.research.google.com/github/{found[1]}/blob/HEAD/{name}"
    return (
        f"Run this chapter elsewhere: [Binder]({binder}), which is slow to start, or [Colab]({colab}), with "
        f"`%env KVLAB_SOURCE=git+{address}` in a cell of its own before the first."
    )


def report_page(report: Path | None, extra: Path) -> str:
    """The page that links to the harness's report, or says how to make one."""
    text = "# The report\n\nEvery method, scored and timed, on one page that `make demo` writes.\n\n"
    if report is None or not report.exists():
        return text + "This site was built without one: run `make demo`, then `make site` again.\n"
    extra.joinpath("harness").mkdir(parents=True, exist_ok=True)
    shutil.copy(report, extra / "harness" / "report.html")
    return text + '<p><a href="harness/report.html">Open the report of this build</a></p>\n'


# The reference: one page for every module that has public names.


def walk(package: str) -> list:
    """The package and its modules, by name, without those that need a package that is not installed."""
    top = importlib.import_module(package)
    found = [top]
    for name in sorted(module.name for module in pkgutil.walk_packages(top.__path__, f"{package}.")):
        if name.endswith("__main__"):
            continue
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as missing:
            if (missing.name or "").split(".")[0] in PACKAGES:
                raise
            print(f"left out of the reference: {name} needs {missing.name}", file=sys.stderr)
    return found


def members(module) -> list[tuple[str, object]]:
    """The public classes and functions that a module defines, with docstrings, in order of the source."""
    found = [
        (name, value)
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
        and value.__name__ == name
        and not name.startswith("_")
        and value.__doc__
    ]
    return sorted(found, key=lambda item: inspect.getsourcelines(item[1])[1])


def module_page(module) -> str:
    """A module's page: what it is for, then every public name with its signature and docstring."""
    parts = [f"# {module.__name__}", prose(inspect.getdoc(module) or "")]
    for name, value in members(module):
        parts += [f"## {name}", signature(name, value), prose(inspect.getdoc(value))]
        for inner, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not inner.startswith("_") and method.__doc__:
                parts += [f"### {name}.{inner}", signature(inner, method), prose(inspect.getdoc(method))]
    return "\n\n".join(parts) + "\n"


def signature(name: str, value) -> str:
    try:
        shown = str(inspect.signature(value)).replace("'", "")
    except ValueError:  # an exception class without an __init__ of its own
        shown = "(message)"
    shown = re.sub(r" at 0x[0-9a-f]+", "", shown)
    return f"```python\n{'class ' if inspect.isclass(value) else 'def '}{name}{shown}\n```"


def prose(text: str) -> str:
    """A docstring as Markdown: paragraphs stay paragraphs, indented blocks become code, and signs outside
    backticks are escaped."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith(("    ", ">>>")):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            parts = re.split(r"(`[^`]*`)", block)
            parts[::2] = [re.sub(r"([\\*_<>\[\]#|$~])", r"\\\1", part) for part in parts[::2]]
            blocks.append("".join(parts))
    return "\n\n".join(blocks)


def first_line(module) -> str:
    return prose((inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " "))
