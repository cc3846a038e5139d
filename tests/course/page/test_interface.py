"""The live page in the hands of a person: keys, links, the tour, widths, light and dark."""

import importlib.resources
import importlib.util
import json
import os
import random
from urllib.parse import urlencode

import pytest
from live import FORMS, SEED, key, told_of


def until(browser, condition: str) -> None:
    look = f"const look = () => ({condition}) ? done() : setTimeout(look, 20); look()"
    browser.run(f"new Promise((done) => {{ {look} }})")


def test_the_page_asks_nothing_of_anybody(opened):
    assert opened.errors == []
    assert not [x for x in opened.requests if not x.startswith(("file:", "data:", "blob:"))]
    assert len([x for x in opened.requests if x.startswith("file:")]) == 1


def test_the_keyboard_alone_is_enough(looked_at):
    document = told_of(random.Random(SEED), FORMS[-1])  # "is called"
    question = document.questions[-1][0].removeprefix("\nQuestion: ")
    browser = looked_at(hash="#" + urlencode({"facts": document.context, "question": question}))
    focused = "document.activeElement"
    reached = []
    for _ in range(60):
        key(browser, "Tab")
        reached.append(browser.run(f"{focused}.id || {focused}.name || {focused}.dataset.at"))
        if reached[-1] == "protocol":
            break
    assert {"tour-play", "tour-next", "0", "step", "facts", "question", "method"} <= set(reached)
    browser.run("$('tokens').firstChild.focus()")
    answer = browser.run("lookedUp().places[0]")
    for _ in range(answer):
        key(browser, "ArrowRight")
    assert browser.run(f"Number({focused}.dataset.at)") == answer
    key(browser, " ", " ")
    other = "saidBy(shown.run).word !== saidBy(shown.full).word"
    until(browser, f"!busy && shown.asked.evicted[0] === {answer} && {other}")
    assert browser.run(f"{focused}.getAttribute('aria-pressed')") == "true"
    assert "The full cache says" in browser.run("$('verdict').textContent")
    key(browser, "Enter", "\r")
    until(browser, f"!busy && !shown.asked.evicted.length && !({other})")


def test_the_pear_trees_of_the_lease_are_no_fact_to_ask_for(looked_at):
    subjects = "subjectsOf('The old pear trees are not cut. The brown dog Otis lives in the mill.')"
    assert looked_at().run(subjects) == ["the brown dog"]


def test_what_cannot_be_read_is_said_in_one_line(looked_at):
    browser = looked_at()
    for facts, why in (
        ("barn " * 1100, "tokens; the page takes 1024"),
        ("", "there is nothing to read yet"),
    ):
        browser.run(f"change({{facts: {json.dumps(facts)}, protocol: 'context-first'}})")
        assert why in browser.run("$('status').textContent")
        said = browser.run("['answer', 'verdict', 'likely', 'bar'].map((id) => $(id).textContent)")
        assert said[0] == "–" and why in said[1] and said[2] == "" and why in said[3]
        assert browser.run("DRAWN.map((id) => $(id).offsetHeight)") == [0, 0, 0]
        browser.run("$('step-on').click(); $('layer').dispatchEvent(new Event('change')); draw()")
        assert browser.run("$('answer').textContent") == "–"
    browser.run(
        f"change({json.dumps({'facts': 'The red fox Ida likes the barn.', 'question': 'the red fox'})})"
    )
    assert browser.run("shown.run.words[shown.run.ids.length]") == " Ida"
    assert browser.run("$('found').offsetHeight > 0 && $('tokens').offsetHeight > 0")
    assert browser.errors == []


@pytest.mark.parametrize("width, dark", [(360, True), (1280, False)], ids=["dark", "light"])
def test_everybody_can_read_it(looked_at, width, dark):
    """The accessibility checker finds nothing, nothing is wider than the screen, nothing is an error."""
    if importlib.util.find_spec("axe_core_python") is None:
        told = "axe-core-python is not installed"
        pytest.fail(told) if os.environ.get("KVLAB_NEED_BROWSER") else pytest.skip(told)
    axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    browser = looked_at(width, dark, "")  # the lease
    browser.run(axe + ";1")
    for state in ("change({evicted: [3]})", "change({method: 'infinigen', layer: 2, head: 1})", "tour.go(3)"):
        browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        browser.run(f"{state}.then(() => 1)")
        found = browser.run(
            "axe.run({resultTypes: ['violations']}).then((r) => r.violations.map((v) => v.id + ': '"
            " + v.nodes.length + ' ' + v.nodes[0].html.slice(0, 200)))"
        )
        assert found == [], state
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.errors == []
