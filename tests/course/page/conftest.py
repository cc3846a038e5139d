"""The live page, built once a module, in Chromium."""

import random
from urllib.parse import urlencode

import pytest
from live import FORMS, told_of

import kvlab
from course.page import build

FACTS = told_of(random.Random(5), FORMS[0])
SHORT = "#" + urlencode({  # six facts, in the lease's place: they are read at once
    "facts": FACTS.context,
    "question": FACTS.questions[0][0].removeprefix("\nQuestion: "),
})  # fmt: skip
SHOWN = "typeof shown !== 'undefined' && shown && !busy"


@pytest.fixture(scope="module")
def rounded():
    """The workshop model with the page's weights, and its tokenizer."""
    model, tokenizer = kvlab.load()
    return build.rounded(model), tokenizer


@pytest.fixture(scope="module")
def file(rounded, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(build.page(*rounded), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["", "#plain"], ids=["simd", "plain"])
def opened(request, file, browser):
    """The page in Chromium, once with the WASM kernel and once with plain JavaScript."""
    browser.open(file.as_uri() + request.param, calm=True)
    loaded = browser.run("ready.then(({found}) => found)")
    assert loaded == {"simd": request.param == ""}
    return browser


@pytest.fixture
def looked_at(file, browser):
    """Opens the page at a size, in light or dark mode, and waits until it has answered."""

    def show(width: int = 1280, dark: bool = False, hash: str = SHORT):
        browser.size(width, 800)
        browser.open(file.as_uri() + hash, ready=SHOWN, calm=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme, still])
        return browser

    yield show
    browser.size(1280, 900)
