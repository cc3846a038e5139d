"""Cells that something happened to: one line, and never another number."""

import contextlib
import json
import random

import pytest
import stored

import kvlab
from eval.command import main
from eval.core.cells import parsed, written
from eval.core.measurement import Cell
from eval.core.results import Store

ESCAPE = "\x1b[2J"


def cell(**more) -> dict:
    about = {"config": {"limit": 4, "model": "aa"}, "chance": 0.25, "value_bytes": 4, "shots": 0}
    return stored.cell(outcomes=[1.0, 0.0, 0.0, 0.5], **about | {"made": "2026-11-01T00:00:00+00:00"} | more)


def timed() -> dict:
    row = {"context": 256, "prefill_ms": 3.0, "decode_ms": 2.0, "device_bytes": 8.0, "host_bytes": 0.0}
    made = stored.cell(task="speed:quick:256", rows=[row | {"moved_bytes": 0.0, "read_gbps": 1.0}])
    return {name: one for name, one in made.items() if name not in ("metrics", "values", "bytes")}


def test_a_cell_is_what_was_written_and_has_no_sum_inside():
    assert parsed(written(cell(pair=(1, 2), nothing=float("nan")))) == cell(pair=[1, 2], nothing=None)


def test_a_cell_without_a_sum_stays_readable(store):
    store.files.write("old.json", json.dumps(cell()).encode())
    assert list(store.records()) == [cell()] and not store.lines


def test_a_flipped_bit_is_noticed_or_says_the_same():
    good, dice = written(cell()), random.Random(0)
    noticed = 0
    for _ in range(1500):
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        try:
            found = parsed(bytes(bad))
        except ValueError:
            noticed += 1
        else:
            assert {name: found[name] for name in cell()} == cell()  # white space, or the sum's own name
    assert noticed > 1000


@pytest.mark.parametrize("seed", range(20))
def test_a_name_that_is_said_twice_is_noticed(seed):
    """Anywhere in a cell, whichever of the two values is right."""
    dice, doubled = random.Random(seed), []

    def twice(value, inside=0):
        if isinstance(value, dict) and value:
            items = [f"{json.dumps(name)}: {twice(one, inside + 1)}" for name, one in value.items()]
            if not doubled and (dice.random() < 0.3 or not inside):
                doubled.append(dice.choice(list(value)))
                items.insert(dice.randrange(len(items) + 1), f"{json.dumps(doubled[0])}: 7")
            return "{" + ", ".join(items) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(twice(one, inside + 1) for one in value) + "]"
        return json.dumps(value)

    good = written(cell()) if seed % 2 else json.dumps(cell()).encode()
    bad = twice(json.loads(good)).encode()
    with pytest.raises(ValueError, match=f"^it says {doubled[0]!r} twice$"):
        parsed(bad)


codes: list[int] = []  # what the reports below ended with
WRONG = [None, 3, True, "x", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("seed", range(30))
def test_another_schema_is_one_line_or_a_report(tmp_path, seed, capsys, no_pictures):
    """Anything in the place of anything, in a cell without a sum; of `kvlab.results` a frame or one line."""
    dice = random.Random(seed)
    out = tmp_path / "out"
    store = Store(out)
    store.prepare()
    store.save(cell(method="sinks:budget=0.5"))
    bad = json.loads(json.dumps(timed() if seed % 3 == 0 else cell()))
    task = bad["task"]
    inside = bad
    while True:
        key = dice.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if not inside[key] or not isinstance(inside[key], dict | list) or dice.random() < 0.4:
            break
        inside = inside[key]
    if dice.random() < 0.3:
        del inside[key]
    else:
        inside[key] = dice.choice(WRONG)
    store.files.write(store.name("m", "full", task, cell()["config"]), json.dumps(bad).encode())
    with contextlib.suppress(ValueError):
        kvlab.results(out)
    codes.append(main(["report", "--out", str(out)]))
    assert codes[-1] in (0, 2)
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.err.count("\n") <= 4
    assert len(codes) < 30 or codes.count(0) > 7  # most of a cell's fields concern no report


@pytest.mark.parametrize("name", ["limit", "method"])
def test_what_no_table_holds_is_one_line(tmp_path, name, capsys, no_pictures):
    store = Store(tmp_path / "out")
    store.prepare()
    store.save(cell(config=cell()["config"] | {name: {}}))
    assert main(["report", "--out", str(store.out)]) == 2
    assert "it holds cells of another schema (ArrowNotImplementedError" in capsys.readouterr().err


@pytest.mark.parametrize("text, why", [
    ("[" * 100_000 + "]" * 100_000, "lists in lists without end"),
    (json.dumps(cell(deep=json.loads("[" * 200 + "]" * 200))), "more than 32 lists in each other"),
    (json.dumps(cell(model=f"{ESCAPE}m")), r"it holds the character '\x1b'"),
    (json.dumps(cell(config={f"{ESCAPE}": 1})), r"it holds the character '\x1b'"),
    (json.dumps(cell(task="a\u202eb")), r"it holds the character '\u202e'"),
    (json.dumps(cell(task="half \ud800")), r"it holds the character '\ud800'"),
    (json.dumps(cell(seconds=float("inf"))), "it holds the number inf"),
    (json.dumps(cell(prefilled_tokens=10**29)), "it holds the number 1000"),
    (json.dumps(cell(values={"acc": [1, -(10**400)]})), "it holds the number -1000"),
    (json.dumps(cell(seconds="long")), "seconds is 'long', which no cell says"),
    (json.dumps(cell(metrics=[3])), "a row of metrics is '3': expected names and values"),
    (json.dumps(cell(metrics=[{"metric": "acc"}])), "a row of metrics has no value"),
    *((text, "damaged cell") for text in ("", "{", "[]", '{"model": "m"}', "\x00\x01", "[" * 100_000)),
])  # fmt: skip
def test_what_is_no_cell_is_skipped_with_one_line_and_made_again(store, text, why):
    store.save(cell(method="int8"))
    store.save(cell())
    name = store.name("m", "full", "recall", cell()["config"])
    store.files.write(name, text.encode())
    assert [one["method"] for one in store.records()] == ["int8"]
    assert len(store.lines) == 1 and why in store.lines[0] and store.lines[0].isprintable()
    assert store.load(Cell("m", "full", "recall", cell()["config"])) is None
    store.save(cell())
    assert store.load(Cell("m", "full", "recall", cell()["config"]))
