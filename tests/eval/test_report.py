"""The report: every method is in it, it stands by itself, and its marks say what the numbers say."""

import json
import random
import re
from html.parser import HTMLParser

import pytest
import stored

import kvlab
from eval import report
from eval.core.results import Store
from eval.report import page, plots, tables
from eval.speed.baselines import BASELINES

KINDS = {"recall": "multiple_choice", "prose": "loglikelihood_rolling"}
LOSS = {"sinks": 0.4, "h2o": 0.25, "int4": 0.05}


def values(method: str, documents: int) -> list[float]:
    wrong = round(LOSS.get(method, 0.0) * documents)
    return [0.0] * wrong + [1.0] * (documents - wrong)


def cell(method, task, metrics, **more):
    config = {"limit": None, "dtype": None, "num_fewshot": None}
    return stored.cell(method, task, metrics=metrics, config=config, commit="abc", **more)


def row(metric, value, better=True, stderr=0.04, n=100):
    return {"metric": metric, "value": value, "stderr": stderr, "n": n, "higher_is_better": better}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = Store(tmp_path_factory.mktemp("report"))
    made.prepare()
    for place, method in enumerate(kvlab.FIRST_WAVE):
        found = values(method, 100)
        share, moved = 0.0 if method == "recompute" else 1e6 * (1 - 0.08 * place), 1e5 * (method == "topk")
        held = {"device_bytes": share, "host_bytes": 0.0, "moved_bytes": moved, "row_steps": 9}
        pairs = [[-100.0 - place - i % 3, 50] for i in range(20)]
        scores = {
            "recall": {"acc": (row("acc", sum(found) / 100), found)},
            "prose": {"word_perplexity": (row("word_perplexity", 7.4 + place, False, None, 20), pairs)},
            "agreement": {
                "top1": (row("top1", 1 - place / 100), found),
                "kl": (row("kl", place / 100, False), found),
            },
        }
        for task, numbers in scores.items():
            each = {metric: every for metric, (_, every) in numbers.items()}
            more = {"values": each, "bytes": held, "value_bytes": 4, "chance": 0.125 * (task == "recall")}
            made.save(cell(method, task, [one for one, _ in numbers.values()], **more))
    for place, method in enumerate([*kvlab.FIRST_WAVE, *BASELINES]):
        for context in (256, 2048):
            ms = 5.0 + place + context / 100 * (method == "recompute")
            timing = dict.fromkeys(("device_bytes", "host_bytes", "moved_bytes"), 1000)
            timing |= {"context": context, "prefill_ms": 10.0, "decode_ms": ms, "read_gbps": 3.0}
            timing |= {"decode_ms_min": ms - 1, "decode_ms_max": ms + 1, "bandwidth_gbps": 30.0}
            timing |= {"fraction_of_bandwidth": 0.1, "waited": 0.8 * (method == "int4")}
            made.save(cell(method, f"speed:model:{context}", [], rows=[timing]))
    (made.out / report.RUN).write_text(json.dumps({"command": "python -m eval all --limit 100"}))
    return made


@pytest.fixture(scope="module")
def written(store):
    return stored.reported(store, width=80)


class Page(HTMLParser):
    """Counts what the checks below ask for."""

    VOID = ("meta", "br", "path", "use", "image")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.labels, self.figures, self.tables = [], [], [], 0, 0
        self.rows = []  # of every table: the number of cells in each of its rows
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.append(found["id"])
        self.figures += tag == "svg" and found.get("role") == "img"
        self.tables += tag == "table" and any("scroll" in o for o in self.open)
        if tag == "table":
            self.rows.append([])
        elif tag == "tr":
            self.rows[-1].append(0)
        elif tag in ("th", "td"):
            self.rows[-1][-1] += 1
        if tag not in self.VOID:
            self.open.append(f"{tag} {found.get('class', '')}")

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop().split()[0] == tag


def test_every_method_is_everywhere(written):
    printed, page, *_ = written
    for method in (*kvlab.FIRST_WAVE, *BASELINES):
        assert method in printed
        assert f'<th scope="row">{method}</th>' in page
    for preset in (kvlab.METHODS[name] for name in kvlab.FIRST_WAVE):
        assert preset.summary.split(";")[0] in page


def test_the_page_stands_by_itself(written):
    page = written[1]
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<img|src=", page)
    parsed = Page(page)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.figures == 3
    assert parsed.tables == 4  # speed, bytes, accuracy, every two methods
    assert all(len(set(cells)) == 1 for cells in parsed.rows), parsed.rows
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_marks_and_headline(written, store):
    printed, page, *_ = written
    (board,) = tables.boards(list(store.records()))
    entries = {m: board.entries[m, "recall"] for m in board.methods if m in board.scored}
    assert [m for m, e in entries.items() if e.worst] == ["sinks"]
    assert entries["full"].best
    assert [m for m, e in entries.items() if e.differs] == ["sinks", "h2o"]  # 5 of 100 lost: p = 0.06
    assert (entries["int4"].lost, entries["int4"].won, round(entries["int4"].p, 4)) == (5, 0, 0.0625)
    line = tables.headline(board)
    assert "100.0 %" in line
    assert "sinks loses most, 40.0 points" in line
    assert "times as long at 2048 tokens" in line
    assert line.split(";")[0] in page
    assert board.chance("recall") == 0.125
    assert "12.5" in page
    assert "60.0*▼" in printed.replace(" ", "")


def test_a_busy_machines_time_is_no_headline(store):
    cells = list(store.records())
    for cell in cells:
        for timing in cell.get("rows", []) if cell["method"] == "recompute" else []:
            timing["waited"] = 0.8
    (board,) = tables.boards(cells)
    assert "times as long" not in tables.headline(board) and "busy" in board.busy


def test_only_what_a_run_has_is_explained(store):
    """A run of one kind of task does not explain another kind, nor an agreement that nobody asked for."""
    several = page.definitions(
        tables.boards([c | {"output_type": KINDS.get(c["task"])} for c in store.records()])
    )
    assert {"log-likelihood", "rolling perplexity", "agreement", "recompute"} < set(several)
    assert "generation" not in several
    recall = [c | {"output_type": "generate_until"} for c in store.records() if c["task"] == "recall"]
    one = page.definitions(tables.boards([c for c in recall if c["method"] in ("full", "int4")]))
    assert set(one) == {"generation", "bytes", "standard errors"}


def test_names_of_few_points_are_inside_the_picture():
    """Neither across the axis, where a method answers nothing, nor out of the picture."""
    name = "mine.SmallestKeys:budget=0.2"
    points = [("full", 1.0, 1.0), ("h2o:budget=0.2", 0.17, 0.2), (name, 0.0, 0.205), (name[::-1], 0.5, 0.9)]
    for chosen in (points[:3], points[::3]):
        given = [{"method": m, "accuracy": a, "stderr": 0.1, "x": x} for m, a, x in chosen]
        figure = plots.against_bytes(given, "bytes held")
        figure.draw_without_rendering()
        axes, whole = figure.axes[0], figure.bbox
        for text in axes.texts:
            box = text.get_window_extent()
            assert box.y0 > axes.bbox.y0 and box.x1 < whole.x1, text.get_text()


@pytest.mark.parametrize("seed", range(12))
def test_a_single_time_has_a_picture(seed, tmp_path):
    """Whatever it is: of one point matplotlib makes axes of no length, a few times in a hundred."""
    dice = random.Random(seed)
    time = dice.choice([11.640345499927207, 11.7, 10 ** dice.uniform(-3, 5)])
    ends = (
        {"decode_ms_min": time * 0.9999999, "decode_ms_max": time * 1.0000001} if dice.random() < 0.5 else {}
    )
    row = {"method": "full", "context": dice.randrange(1, 10**5), "decode_ms": time} | ends
    plots.save(plots.against_context([row]), tmp_path / "times", bbox_inches="tight")
