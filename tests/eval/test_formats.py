"""A paper's formats and the tidy frame say what the report says."""

import re
import sys

import pytest
from stored import reported, store_of

import kvlab

from .test_statistics import cell

INSIDE = cell("full", 20)["config"] | {"protocol": "question-inside", "evict": "every-step"}
CELLS = [
    cell("full", 38), cell("snapkv:budget=0.2", 20), cell("int4", 37, config=INSIDE),
    cell("full", 36, config=INSIDE), cell("full", 10, 12, config=INSIDE | {"limit": 12}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    timed = {"context": 256, "decode_ms": 2.5, "prefill_ms": 9.0, "device_bytes": 5, "host_bytes": 2}
    speed = cell("full", 0, task="speed:model:256", rows=[timed]) | {"metrics": []}
    return store_of(tmp_path_factory.mktemp("results"), [*CELLS, speed])


def make(store, form):
    printed, *_, paths = reported(store, width=120, form=form)
    assert printed.strip().endswith(f"report: {paths[1]}")
    return paths[1]


def test_latex_is_whole(folder):
    """Braces and environments are closed, every line of a table has its columns, every figure is there."""
    text = make(folder, "latex").read_text()
    assert re.sub(r"\\[{}]", "", text).count("{") == re.sub(r"\\[{}]", "", text).count("}")
    opened = re.findall(r"\\begin\{(\w+)\}", text)
    assert sorted(opened) == sorted(re.findall(r"\\end\{(\w+)\}", text)) and "table" in opened
    for columns, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.S):
        lines = [line for line in body.splitlines() if line.endswith(" " + "\\" * 2)]
        assert len(lines) > 1 and all(len(re.findall(r"(?<!\\)&", one)) == len(columns) - 1 for one in lines)
    for name in re.findall(r"\\includegraphics\[.*?\]\{(.*?)\}", text):
        assert (folder.out / name).read_bytes().startswith(b"%PDF")
    assert text.isascii() and r"\texttt{snapkv:budget=0.2}" in text and r"100 \%" in text


def test_markdown_and_pdf(folder):
    text = make(folder, "markdown").read_text()
    assert "recall, context-first | recall, question-inside" in text and ".." not in text
    assert "Every pair of methods: m, limit none, recall, context-first" in text
    assert all((folder.out / name).is_file() for name in re.findall(r"\]\((.*?)\)", text))
    assert make(folder, "pdf").read_bytes().startswith(b"%PDF")


def test_a_folder_is_a_tidy_frame(folder):
    frame = kvlab.results(folder.out)
    assert list(frame)[:8] == ["task", "method", "curve", "budget", "protocol", "limit", "dtype", "model"]
    assert len(frame) == len(CELLS) + 1
    snap = frame[frame.method == "snapkv:budget=0.2"].iloc[0]
    assert (snap.score, snap.n, snap.bytes, snap.budget, snap.lost) == (0.5, 40, 2e5, 0.2, 18)
    fast = frame[frame.context == 256].iloc[0]
    assert (fast.ms, fast.bytes, fast.method) == (2.5, 7, "full")
    assert frame[frame.method == "int4"].iloc[0].won == 1  # beside full inside the question, not first
    assert frame.groupby(["protocol", "limit"], dropna=False).size().sum() == len(frame)


def test_what_is_no_folder_of_results_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there are no cells of accuracy or speed"):
        kvlab.results(tmp_path)
    with pytest.raises(TypeError, match="where: expected a folder or an address, got 3"):
        kvlab.results(3)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match='pandas is not installed: pip install "kvlab'):
        kvlab.results(tmp_path)
