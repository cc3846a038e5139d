"""The page of documents: what a method lost comes first, with its answer and the evidence that it held."""

import json
import random

import pytest
from stored import reported

from eval.core.results import Store
from eval.report import answers

from .test_report import Page
from .test_statistics import cell

RIGHT = {  # of four documents
    "full": [1.0, 1.0, 0.0, 1.0], "h2o:budget=0.2": [0.0, 1.0, 0.0, 0.0], "int4": [1.0, 1.0, 1.0, 0.0]
}  # fmt: skip


def line(doc: int, right: float, held: float) -> dict:
    evidence = [{"tokens": ["The", " <b>", " fox"], "held": [1.0, held, 0.0]}]
    found = {
        "doc_id": doc,
        "question": f"Who & what {doc}?",
        "gold": ["Mia", "Otto"],
        "answer": f" said {doc}",
    }
    return found | {"right": right, "evidence": evidence}


@pytest.fixture()
def store(tmp_path):
    made = Store(tmp_path)
    made.prepare()
    for method, values in RIGHT.items():
        found = cell(method, int(sum(values)), 4) | {"values": {"acc": values}}
        made.save(found | {"samples": [line(doc, one, 0.5) for doc, one in enumerate(values)]})
    return made


def write(store, **how) -> tuple[str, str, list[dict]]:
    """What is printed, the page, and the lines."""
    printed, *_ = reported(store, width=100, **how)
    told = (store.out / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return printed, (store.out / "answers.html").read_text(encoding="utf-8"), [*map(json.loads, told)]


def test_what_was_lost_comes_first(store):
    printed, page, told = write(store)
    assert [(one["doc_id"], one["kind"], one["lost"]) for one in told] == [
        (3, answers.LOST, 2), (0, answers.LOST, 1), (2, answers.BOTH, 0), (1, answers.RIGHT, 0)
    ]  # fmt: skip
    assert (
        told[0]["answers"]["h2o:budget=0.2"]["answer"] == " said 3" and told[0]["protocol"] == "context-first"
    )
    places = [page.index(f"Who &amp; what {doc}?") for doc in (3, 0, 2, 1)]
    assert places == sorted(places)
    assert "(first those that full gets right and another method gets wrong: 2)" in printed
    assert 'href="answers.html"' in (store.out / "report.html").read_text()
    assert page.count("Right under full, wrong under another method: 2 documents") == 1


def test_nothing_is_lost_where_the_reference_has_no_answers(store):
    for file in (store.out / "samples").glob("full*"):
        file.unlink()
    printed, page, told = write(store)
    assert "gets right" not in printed and "Right under full" not in page
    assert {one["kind"] for one in told} == {answers.WRONG, answers.RIGHT}
    assert "Wrong under a method, and not asked under full: 3 documents" in page


def test_the_page_is_whole_and_says_what_was_held(store):
    _, page, _ = write(store)
    assert Page(page).open == [] and "<script" not in page
    assert "&lt;b&gt;" in page and "Mia, Otto" in page and "<b> fox" not in page
    assert '<span style="--part:0.71" title="50 % held"> &lt;b&gt;</span>' in page
    assert '<span class="gone" style="--part:0.0" title="0 % held"> fox</span>' in page
    assert "50 % held</small>" in page


@pytest.mark.parametrize("seed", range(6))
def test_a_line_that_says_another_kind_of_thing_costs_only_its_own_samples(store, seed):
    draw, name = random.Random(seed), "int4"
    file = next(path for path in store.out.rglob("*.jsonl") if path.name.startswith(name))
    lines = [json.loads(one) for one in file.read_text(encoding="utf-8").splitlines()]
    wrong = draw.choice(["x", [1], {"a": 1}, [{"tokens": ["a"], "held": [-1.0]}], [{"held": [0.5]}], [None]])
    field = draw.choice(["doc_id", "right", "evidence", "question"])
    draw.choice(lines)[field] = wrong
    file.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    if field == "question" and wrong == "x":
        return
    told = write(store)[-1]
    assert name not in told[0]["answers"] and "full" in told[0]["answers"]
