"""The store: atomic, resumable, honest about damage; the tables have the promised fields."""

import multiprocessing
import os
import subprocess
import sys
import urllib.request
import uuid

import pytest
from stored import cell

import kvlab
from eval.accuracy import data, settings
from eval.command import main
from eval.core import study
from eval.core.cells import parsed
from eval.core.errors import Problem
from eval.core.measurement import Cell
from eval.core.merge import merge
from eval.core.results import Store


def test_a_cell_comes_back_only_for_its_own_settings(store):
    store.save(cell(config={"limit": None, "pair": (1, 2)}))
    wanted = Cell("m", "full", "recall", {"limit": None, "pair": (1, 2)})
    assert store.load(wanted)["metrics"]
    other = Cell("m", "full", "recall", {"limit": 4, "pair": (1, 2)})
    assert store.load(other) is None
    store.save(cell(config=other.config))
    assert store.load(other) and store.load(wanted)  # beside each other
    assert store.load(Cell("m", "full", "chain", {"limit": None})) is None
    assert not store.lines


def test_names_do_not_collide(store):
    names = ("h2o:budget=0.2", "h2o_budget=0.2", "a/b", "a:b", "x" * 300)
    assert len({store.name("m", method, "t", {}) for method in names}) == len(names)
    for method in names:
        store.save(cell(method))
    assert {found["method"] for found in store.records()} == set(names)


@pytest.mark.parametrize("text", ["{", "[1]\n", "\ufffe{}", '{"doc_id": 0}\n', "[" * 100_000])
def test_damaged_samples_are_a_warning(store, text):
    sample = {"doc_id": 0, "question": "q", "gold": "g", "answer": "a", "right": 1}
    store.save(cell() | {"samples": [sample]})
    assert store.samples(cell()) == [sample] and not store.lines
    (store.out / "samples" / (store.name("m", "full", "recall", {"limit": 4}) + "l")).write_text(text)
    assert store.samples(cell()) == []
    (line,) = store.lines
    assert line.startswith("damaged samples full--recall--")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_a_folder_and_a_name_that_steers_the_terminal(store):
    store.save(cell(method="int8"))
    os.mkfifo(store.out / "cells" / "pipe.json")
    (store.out / "cells" / "folder.json").mkdir()
    (store.out / "cells" / "\x1b[2J.json").write_text("{")
    assert [one["method"] for one in store.records()] == ["int8"]
    assert len(store.lines) == 3 and all(line.isprintable() for line in store.lines)


# several runs


def saves(out: str, name: str) -> None:
    for number in range(40):
        Store(out).prepare()
        Store(out).save(cell(f"{name}{number}"))


def test_runs_into_one_folder_take_nothing_from_each_other(tmp_path):
    """Every one prepares the folder again and again while others write."""
    fork = multiprocessing.get_context("fork")  # which need not import anything
    processes = [fork.Process(target=saves, args=(str(tmp_path), name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(Store(tmp_path).records())) == 120


# folders elsewhere


@pytest.mark.parametrize(
    ("where", "said"),
    [("nowhere://x/y", "nowhere"), ("http://127.0.0.1:9/x", "cannot be written")],
)
def test_an_address_that_cannot_be(where, said):
    with pytest.raises(Problem, match=said) as raised:
        Store(where).prepare()
    assert str(raised.value).startswith(f"--out {where}: ") and "\n" not in str(raised.value)


@pytest.fixture
def bucket(monkeypatch):
    """An address on a server on loopback that speaks S3's protocol."""
    for package in ("s3fs", "moto"):
        pytest.importorskip(package, reason=f"{package} is not installed: S3's protocol is not tried")
    script = "from moto.server import ThreadedMotoServer as S; "
    script += "s = S(ip_address='127.0.0.1', port=0, verbose=False); s.start(); "
    script += "print(s.get_host_and_port()[1], flush=True); import sys; sys.stdin.read()"
    server = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    port = int(server.stdout.readline())
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/cells", method="PUT"))
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # fsspec remembers one, and the server that it was for
    yield "s3://cells/study"
    server.stdin.close()
    server.wait(20)


@pytest.mark.parametrize("system", ["memory", "s3"])
def test_a_sweep_into_an_address(request, folder, tmp_path, capsys, system):
    """Its cells and its report come there, the same command finds them, and they are those of a folder."""
    where = request.getfixturevalue("bucket") if system == "s3" else f"memory://{uuid.uuid4().hex}/study"
    words = ["accuracy", "--model", str(folder), "--limit", "2", "--tasks", "recall", "--jobs", "0"]
    words += ["--methods", "full", "int8", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main([*words, where]) == 0
    assert main([*words, where]) == 0
    assert "2 of 2 accuracy cells are kept" in capsys.readouterr().err
    here, there = Store(tmp_path / "out"), Store(where)
    assert there.home.read("report.html") and there.home.read("run.json")
    found, expected = ([(c["method"], c["values"], c["bytes"]) for c in s.records()] for s in (there, here))
    assert found == expected and len(found) == 2


# merging

ANSWERED = {"doc_id": 0, "question": "Who?", "gold": "Ida", "answer": "Otis", "right": 0.0}


@pytest.fixture
def halves(tmp_path):
    """Two folders that share a cell, made at other times and in other seconds."""
    stores = [Store(tmp_path / name) for name in ("a", "b", "c")]
    for store in stores:
        store.prepare()
    stores[0].save(cell("full", made="2026-01-01", seconds=1.0))
    stores[0].save(cell("int8"))
    stores[1].save(cell("full", made="2026-02-02", seconds=2.0))
    stores[1].save(cell("int4") | {"samples": [ANSWERED]})
    return stores


def test_a_flipped_bit_in_samples_is_noticed(tmp_path):
    told = []
    store = Store(tmp_path, told.append)
    store.prepare()
    store.save(cell("int4") | {"samples": [ANSWERED]})
    (one,), (file,) = store.records(), (tmp_path / "samples").glob("*.jsonl")
    good = file.read_bytes()
    assert store.samples(one) == [ANSWERED] and not told
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        assert store.samples(one) == []
    assert "damaged samples" in told[0]


def test_halves_are_merged(halves):
    a, b, c = halves
    assert merge([a.where, b.where], c, pytest.fail) == (3, 3)
    assert {one["method"] for one in c.records()} == {"full", "int8", "int4"}
    assert c.load(Cell("m", "full", "recall", {"limit": 4}))["made"] == "2026-01-01"
    assert merge([a.where, b.where], c, pytest.fail) == (0, 3)  # again: nothing is new
    b.save(cell("full", made="2026-02-02", seconds=2.0) | {"samples": [ANSWERED]})  # which a has without
    assert merge([b.where], a, pytest.fail) == (1, 3)
    assert [a.samples(one) for one in a.records()] == [[ANSWERED], [ANSWERED], []]
    elsewhere = Store(f"memory://{uuid.uuid4().hex}")
    elsewhere.prepare()
    assert merge([c.where], elsewhere, pytest.fail) == (3, 3)
    assert [elsewhere.samples(one) for one in elsewhere.records()] == [[], [ANSWERED], []]


def test_samples_are_known_by_the_sum_of_their_own_cell(halves):
    """Where the first cell's own are gone, and the other's are in another form."""
    a, b, c = halves
    for store, answer in ((a, "Otis, a dog"), (b, "Otis")):
        store.save(cell("full") | {"samples": [ANSWERED | {"answer": answer}]})
    for file in (a.out / "samples").glob("full*"):
        file.unlink()
    merge([a.where, b.where], c, pytest.fail)
    (full,) = (one for one in c.records() if one["method"] == "full")
    assert c.samples(full) == [ANSWERED]


def test_cells_that_differ_are_refused_with_both_paths(halves):
    a, b, c = halves
    other = cell("full") | {"rows": [{"decode_ms": 1.0}]}
    other["metrics"][0]["value"] = 0.6
    b.save(other)
    with pytest.raises(Problem, match="other metrics and rows") as raised:
        merge([a.where, b.where], c, pytest.fail)
    for store in (a, b):
        assert str(store.out / "cells" / store.name("m", "full", "recall", {"limit": 4})) in str(raised.value)
    assert not c.files.names()


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("read", [
    lambda file: kvlab.load(device_map=str(file)),
    lambda file: data.rows("--data x", str(file)),
    lambda file: settings.documents(str(file)),
    lambda file: study.arguments('{"a": ' + DEEP + "}"),
    lambda file: study.read(str(file)),
    lambda file: parsed(file.read_bytes()),
], ids=["map", "rows", "documents", "arguments", "study", "cell"])  # fmt: skip
def test_lists_in_lists_without_end_are_one_line(read, tmp_path):
    file = tmp_path / "deep.json"
    file.write_text('{"a": ' + DEEP + "}")
    with pytest.raises(ValueError) as error:
        read(file)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 1000


def test_a_pipe_is_no_file_of_rows(tmp_path):
    """Rows are read twice, so that a pipe would be empty then; one that nobody writes to would never end."""
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(Problem, match="--data x: it is no file"):
        data.rows("--data x", str(tmp_path / "rows.jsonl"))
