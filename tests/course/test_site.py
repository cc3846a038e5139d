"""The sources of the site are complete, and the built site is whole, offline, and readable by everyone.

`make test-site` looks at what `make site` has built (KVLAB_SITE names the folder); without it, tests skip.
"""

import importlib.resources
import importlib.util
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from course import site
from course.editions import BEGIN, END, INSTEAD

BUILT = Path(os.environ.get("KVLAB_SITE") or "nowhere").resolve()
SHOTS = BUILT.parents[1] / "screenshots" if len(BUILT.parents) > 1 else BUILT
WIDTHS = (360, 768, 1280)
no_site = pytest.mark.skipif(not BUILT.is_dir(), reason="no site to look at: make site, then make test-site")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    report = tmp_path_factory.mktemp("report") / "report.html"
    report.write_text("<p>a report</p>")
    return site.write(tmp_path_factory.mktemp("site"), report)


def files_of(toc) -> list[str]:
    if isinstance(toc, dict):
        own = [toc["file"]] if "file" in toc else []
        return own + [f for value in toc.values() for f in files_of(value)]
    return [f for item in toc for f in files_of(item)] if isinstance(toc, list) else []


def test_every_chapter_guide_and_module_is_in_the_contents(source):
    files = files_of(yaml.safe_load((source / "_toc.yml").read_text()))
    assert len(set(files)) == len(files)
    for name in files:
        assert any((source / f"{name}{kind}").is_file() for kind in (".md", ".ipynb")), name
    chapters = {path.stem for path in (site.ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert {Path(name).name for name in files if name.startswith("notebooks/")} == chapters
    assert {"api/kvlab.cache", "api/kvlab.keep.h2o", "api/eval.accuracy.lm", "report", "README"} <= set(files)
    assert (source.parent / "extra" / "harness" / "report.html").read_text() == "<p>a report</p>"
    for name in (site.LIVE, site.STORY):
        assert (source.parent / "extra" / name).is_file()
        assert f'"{name}"' in (source / "index.md").read_text()
    assert f'data="{site.STORY}"' in (source / "README.md").read_text()


def test_no_cell_for_the_instructor_and_no_mark_around_a_solution_is_on_the_site(source):
    for path in source.glob("notebooks/*.ipynb"):
        assert not any(mark in path.read_text() for mark in ("For the instructor.", BEGIN, INSTEAD, END))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of two files, and what writes its pages."""
    monkeypatch.setattr(site, "ROOT", tmp_path / "project")
    (site.ROOT / "docs").mkdir(parents=True)
    (site.ROOT / "part.py").write_text('text = "`````"\n')
    (site.ROOT / "page.html").write_text("<p>page</p>")
    return site.Pages(tmp_path / "out")


def write(pages, text: str) -> str:
    (site.ROOT / "docs" / "one.md").write_text(text)
    pages.add("docs/one.md")
    pages.finish()
    return (pages.source / "docs" / "one.md").read_text()


def test_links_are_followed_to_a_page_of_their_own(project):
    text = write(
        project, "[the part](../part.py), [a page](../page.html#x), [far](https://a.b/c), [here](#x)"
    )
    assert "[the part](../part.py.md)" in text and '<a href="../page.html#x">a page</a>' in text
    assert "[far](https://a.b/c)" in text and "[here](#x)" in text
    assert 'text = "`````"' in (project.source / "part.py.md").read_text()
    assert (project.extra / "page.html").is_file()


# The built site.


class Links(HTMLParser):
    """The addresses that a page points to, what it loads, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        for name in ("src", "href") if tag in ("script", "img", "link", "iframe") else ():
            if found.get(name) and found.get("rel") not in ("canonical", "next", "prev"):
                self.loads.append(found[name])
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}


def built_pages() -> list[Path]:
    found = (path for path in BUILT.rglob("*.html") if BUILT.is_dir())
    return sorted(path for path in found if not path.relative_to(BUILT).parts[0].startswith("_"))


@no_site
def test_no_link_of_the_site_is_broken():
    read = {path: Links(path.read_text(encoding="utf-8")) for path in built_pages()}
    assert len(read) > 20
    wrong = []
    for page, found in read.items():
        for link in found.links + found.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            state = target == BUILT / site.LIVE  # what follows # sets the live page, and is no place in it
            there = target in read and (state or parts.fragment in read[target].anchors)
            if not (there or (target.is_file() and target not in read)):
                wrong.append(f"{page.relative_to(BUILT)}: {link}")
    assert not wrong


@no_site
def test_the_site_loads_nothing_from_elsewhere():
    for page in built_pages():
        loads = Links(page.read_text(encoding="utf-8")).loads
        assert not [x for x in loads if re.match(r"(https?:)?//", x)], page


@pytest.fixture(scope="module")
def axe():
    """The accessibility checker, where it is installed (the package axe-core-python carries it)."""
    if importlib.util.find_spec("axe_core_python") is None:
        return None
    return importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()


# Code, outputs and figures whose content is wider than their box, or whose box is wider than the article.
# Code and tables (`pre`) scroll inside their own box, where the keyboard reaches them.
TOO_WIDE = """
[...document.querySelectorAll("article :is(pre, img, .cell_output, .cell_output *)")].filter(box => {
  const inside = box.closest("article").getBoundingClientRect(), own = box.getBoundingClientRect();
  const wide = box.scrollWidth > box.clientWidth + 1, pre = box.closest("pre");
  const scrolls = pre && getComputedStyle(pre).overflowX === "auto" && pre.tabIndex === 0;
  if (box !== pre && scrolls) return false;
  return own.width && (wide && !scrolls && getComputedStyle(box).display !== "inline"
    || own.right > inside.right + 1);
}).map(box => box.tagName + " " + box.textContent.slice(0, 60))"""


@no_site
@pytest.mark.parametrize("page", built_pages(), ids=lambda page: str(page.relative_to(BUILT)))
def test_a_page_of_the_site(page, browser, axe):
    """No console error, no request to elsewhere, no horizontal scroll, nothing seriously inaccessible."""
    for width in WIDTHS:
        browser.size(width, 900)
        browser.open(page.as_uri())
        assert browser.errors == []
        assert not [x for x in browser.requests if not x.startswith(("file:", "data:", "about:", "blob:"))]
        browser.screenshot(SHOTS / str(width) / f"{str(page.relative_to(BUILT)).replace('/', '_')}.png")
        assert browser.run("document.documentElement.scrollWidth") <= width, width
        assert browser.run(TOO_WIDE) == [], width
        if axe is None:
            continue
        browser.run(axe + ";1")
        found = browser.run(
            "axe.run({resultTypes: ['violations'], iframes: false}).then(r => r.violations.filter(v =>"
            " ['serious', 'critical'].includes(v.impact)).map(v => v.id + ': ' + v.nodes.length + ' '"
            " + v.nodes[0].html.slice(0, 160)))"
        )
        assert found == [], width
