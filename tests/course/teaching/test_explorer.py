"""The interactive page shows what the caches held, and can be worked by keyboard, on a phone and in grey."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvlab
from course.teaching import explorer
from course.teaching.pictures import EVICTED, FETCHED, HOST, KEPT
from kvlab.models import WORKSHOP
from kvlab.policy import resolve_budget

STORED = Path(__file__).resolve().parents[3] / "notebooks" / "explorer.html"
BUDGET = 0.2


@pytest.fixture(scope="module")
def data():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer, "BUDGETS", (BUDGET,))
        return explorer.recordings(*kvlab.load())


def unpack(html: str) -> dict:
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', html).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def states(run: dict, layer: int, head: int, row: int) -> list[int]:
    return [int(state) for state in run["states"][layer][head][row]]


def test_every_row_follows_the_method(data):
    prompt = len(data["facts"])
    limit = resolve_budget(BUDGET, prompt)
    for question in data["questions"]:
        runs = {name: found[0] for name, found in question["runs"].items()}
        assert set(runs) == set(explorer.SHOWN)
        for row in range(len(runs["full"]["fed"])):
            seen = prompt + row
            cached = range(2, data["layers"]), range(data["heads"])
            for layer, head in ((i, h) for i in cached[0] for h in cached[1]):
                at = lambda name: states(runs[name], layer, head, row)  # noqa: B023
                assert at("full") == [KEPT] * seen
                window = limit - 4
                assert at("sinks") == [KEPT] * 4 + [EVICTED] * (seen - limit) + [KEPT] * window
                assert at("h2o").count(KEPT) == limit
                assert at("h2o")[-limit // 2 :] == [KEPT] * -(-limit // 2)
                if row == 0:
                    assert at("topk") == at("infinigen") == [HOST] * seen
                else:
                    assert at("topk").count(FETCHED) == resolve_budget(BUDGET, seen)
                    assert 1 <= at("infinigen").count(FETCHED) <= resolve_budget(BUDGET, seen)
                    assert at("topk")[-1] == at("infinigen")[-1] == KEPT


def test_what_is_lost_stays_lost_and_nothing_else_is(data):
    for question in data["questions"]:
        for name, (run,) in question["runs"].items():
            lost = {
                (layer, head, i)
                for layer in range(data["layers"])
                for head in range(data["heads"])
                for i, state in enumerate(states(run, layer, head, 0))
                if state == EVICTED
            }
            assert bool(lost) == (name in ("sinks", "h2o"))
            assert all(states(run, layer, head, -1)[i] == EVICTED for layer, head, i in lost)


def test_attention_and_answers_agree_with_a_plain_forward_pass(data):
    """An independent reference: transformers' own eager attention over facts and question at once."""
    tokenizer = kvlab.load()[1]
    plain = AutoModelForCausalLM.from_pretrained(
        WORKSHOP / "checkpoint", dtype=torch.float32, attn_implementation="eager"
    )
    text = "".join(data["facts"])
    for question in data["questions"]:
        ids = tokenizer(text).input_ids + tokenizer(question["text"]).input_ids
        with torch.no_grad():
            out = plain(torch.tensor([ids]), output_attentions=True)
        top = out.logits[0, -1].argmax()
        full, sinks = question["runs"]["full"][0], question["runs"]["sinks"][0]
        assert explorer.said(question, full) == tokenizer.decode([top])
        row = question["row"]
        for layer in range(data["layers"]):
            weights = out.attentions[layer][0, :, -1].unflatten(0, (data["heads"], -1)).mean(1)
            for head in range(data["heads"]):
                paid = [int(digit) for digit in question["paid"][layer][head][row - 1]]
                near = (9 * weights[head].sqrt() - torch.tensor(paid)).abs()
                assert near.max() < 0.51
                held = states(sinks, layer, head, row - 1)  # and this step's own token
                gone = torch.tensor([state == EVICTED for state in [*held, KEPT]])
                missed = 100 * float(weights[head][gone].sum())
                assert abs(missed - sinks["missed"][layer][head][row - 1]) <= 0.51
        at = torch.stack([a[0, :, -1, question["at"]] for a in out.attentions])
        at = at.unflatten(1, (data["heads"], -1)).mean(2)
        reader = question["reader"]
        assert abs(100 * float(at[reader["layer"], reader["head"]]) - 100 * float(at.max())) <= 0.01
        assert abs(100 * float(at.max()) - reader["percent"]) <= 0.51


def test_no_attention_is_missed_once_another_token_was_fed(data):
    for question in data["questions"]:
        full = question["runs"]["full"][0]["ids"]
        for name, (run,) in question["runs"].items():
            alike = sum(run["ids"][: row + 1] == full[: row + 1] for row in range(1, len(full)))
            assert len(run["missed"][0][0]) == (0 if name == "full" else alike)


def test_the_page_is_one_small_file_with_everything_in_it(data):
    html = explorer.page(data)
    assert unpack(html) == json.loads(json.dumps(data))
    outside = re.findall(r'(?:src|href|url|import|fetch)\s*[=(]\s*["\']?([^"\'\s>)]+)', html)
    assert set(outside) <= {"data:,"}
    assert explorer.page(data) == html


def test_the_stored_page_is_that_of_this_model():
    html = STORED.read_text()
    assert len(html) < 2_000_000
    again = "record it again: python -m course.teaching.explorer --out notebooks/explorer.html"
    assert f'name="kvlab-weights" content="{explorer.weights()}"' in html, again
    assert tuple(unpack(html)["budgets"]) == explorer.BUDGETS, again


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explorer, "load", lambda: ())
    monkeypatch.setattr(explorer, "recordings", lambda *_: None)
    monkeypatch.setattr(explorer, "page", lambda _: "page")
    with pytest.raises(SystemExit):
        explorer.main(["--out", str(tmp_path)])
    assert capsys.readouterr().err.strip().endswith(f"--out {tmp_path}: Is a directory")
    explorer.main(["--out", str(tmp_path / "new" / "page.html")])
    assert (tmp_path / "new" / "page.html").read_text() == "page"


@pytest.fixture
def opened(browser, data, tmp_path):
    """A function that opens the page at a window width; returns the browser."""
    page = tmp_path / "explorer.html"
    page.write_text(explorer.page(data))

    def open(width: int = 1280, start: str = ""):
        browser.size(width, 900)
        browser.open(f"{page.as_uri()}{start}", "document.body?.dataset.ready")
        return browser

    yield open
    assert browser.errors == []
    assert browser.requests == [page.as_uri()] or browser.requests == []


def on_page(browser) -> list[int]:
    """The states of the tokens, as the page marks them."""
    return browser.run("[...document.querySelectorAll('#text .t')].map(t => +t.className.match(/s(\\d)/)[1])")


def select(browser, name: str, value) -> None:
    browser.run(f"$('{name}').value = '{value}', $('{name}').onchange()")


def test_the_page_shows_every_recording(opened, data):
    browser = opened()
    for number, question in enumerate(data["questions"]):
        select(browser, "question", number)
        for name, (run,) in question["runs"].items():
            select(browser, "method", name)
            for layer, head, step in ((0, 0, 0), (3, 5, question["row"]), (data["layers"] - 1, 1, 2)):
                select(browser, "layer", layer)
                select(browser, "head", head)
                browser.run(f"go({step})")
                assert on_page(browser) == states(run, layer, head, step)
            browser.run(f"go({question['row']})")
            text, said = browser.run("$('answer').textContent"), explorer.said(question, run)
            assert f"answers “{said.strip()}”" in text
            assert ("right ✓" in text) == (said == question["answer"])
            assert ("wrong ✗" in text) == (said != question["answer"])


def test_the_answer_is_hidden_until_the_question_is_complete(opened, data):
    browser = opened()
    browser.run(f"go({data['questions'][1]['row'] - 1})")
    assert "Not asked yet" in browser.run("$('answer').textContent")


def test_the_keyboard_alone_is_enough(opened, data):
    browser = opened()
    reached = []
    for _ in range(6):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.id"))
    assert reached == ["question", "method", "layer", "head", "step", "on"]  # the others are off here
    browser.run("document.activeElement.blur()")
    browser.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert browser.run("step") == 1
    browser.run("$('step').focus()")
    browser.press("End")
    last = len(data["questions"][1]["runs"]["full"][0]["fed"]) - 1
    assert browser.run("step") == last and browser.run("$('on').disabled")
    browser.press("Home")
    assert browser.run("step") == 0 and browser.run("$('back').disabled")
    browser.run("$('method').focus()")
    browser.press("ArrowDown")
    assert browser.run("view.method") == "sinks"


def test_an_address_can_name_where_to_start(opened):
    browser = opened(start="#method=infinigen&question=0&layer=99")
    assert browser.run("[view.method, view.q === data.questions[0], view.layer < data.layers]") == [
        "infinigen", True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_cut_off_at_any_width(opened, width):
    browser = opened(width, "#method=infinigen")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_states_can_be_told_apart_in_grey(opened):
    """Every state has a mark of its own."""
    browser = opened(start="#method=infinigen")
    browser.press("ArrowRight")
    marks = browser.run(
        "Object.fromEntries([...document.querySelectorAll('#text .t')].map(t =>"
        " [t.className.match(/s(\\d)/)[1], t.querySelector('sup')?.textContent ?? '']))"
    )
    assert len(set(marks.values())) == len(marks) == 3
