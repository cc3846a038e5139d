"""A learner's own cache: it decodes the models as the full cache does, and its parts are kept in a file."""

import ast
import json
import linecache
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kvlab
from course.teaching import check, kept, lease, lesson, mine, parts
from kvlab import trial
from kvlab.calibrate.skew import skew
from kvlab.keep import Keep


@pytest.fixture(scope="module")
def loaded():
    return lesson.start()


@pytest.fixture
def model(loaded):
    return loaded[0]


@pytest.fixture
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """Runs a cell's text as a notebook does, in an empty folder; returns what it defines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "_parts", {})

    def run(text: str, name: str = "cell 1", known: dict | None = None) -> dict:
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        scope = {"torch": torch, "mine": mine, "check": check, **(known or {})}
        exec(compile(kept.plain(text), name, "exec"), scope)
        return scope

    return run


def test_everything_kept_is_the_full_cache(model, tokenizer):
    ids = tokenizer("The brown dog Otis lives in the mill. The brown dog", return_tensors="pt").input_ids
    for _ in range(2):
        own, full = mine.Reader(model, mine.Cache()), kvlab.Stepper(model, kvlab.make_cache(model, "full"))
        for start, end in ((0, 7), (7, 8), (8, ids.shape[1])):
            ours, theirs = own.feed(ids[:, start:end]), full.feed(ids[:, start:end], last=True)
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        held = own.cache.stats()
        assert (held.tokens_held, held.tokens_seen) == (ids.shape[1], ids.shape[1])


def test_the_check_says_what_a_caches_answers_to_clause_17_show(model, tokenizer, capsys):
    class Nothing(mine.Cache):
        def append(self, layer, k, v):
            pass

    class Unfinished(mine.Cache):
        def attend(self, layer, q, k, v):
            return ...

    class Stops(mine.Cache):
        def attend(self, layer, q, k, v):
            return q, k, v

    class Exchanged(mine.Cache):
        def attend(self, layer, q, k, v):
            K, V = self.read(layer, q) if layer in self.K else (k[:, :0], v[:, :0])
            self.append(layer, k, v)
            return mine.part("attend_step")(q, K, V, k, v)[0]

    for made, said in (
        (mine.Cache, "correct: your cache answers 6 of 6 leases"),
        (Nothing, "incorrect: no lease is answered"),
        (Unfinished, "not attempted"),
        (Stops, "incorrect: it stops before all leases are answered"),
        (Exchanged, "incorrect: 1 of 6 leases answered, and 6 can be: what is held of the others?"),
    ):
        check.clause17(model, tokenizer, made)
        assert capsys.readouterr().out.splitlines()[-1].startswith(said)


RIGHT = """
%matplotlib inline
def real_slots(seen, window):
    ### BEGIN SOLUTION
    return [slot >= window - seen for slot in range(window)]
    ### END SOLUTION


kept = mine.keep(real_slots)
"""


def test_a_right_part_is_kept_and_found_by_its_name(cell, capsys):
    yours = cell(RIGHT)["kept"]
    assert capsys.readouterr().out == "real_slots: yours, kept in my_cache.py\n"
    text = (Path.cwd() / kept.FILE).read_text()
    assert "SOLUTION" not in text and text.count("def real_slots") == 1
    parts._parts.clear()
    assert mine.part("real_slots")(2, 5) == yours(2, 5) == [False, False, False, True, True]
    assert mine.part("real_slots") is not check.EXERCISES["real_slots"].right


def test_a_part_is_replaced_and_the_others_stay(cell):
    cell(RIGHT)
    cell("class Small(mine.Cache):\n    def leave(self, layer, q): pass\n\nmine.keep(Small)", "cell 2")
    cell(RIGHT.replace("slot >= window", "slot + 0 >= window"), "cell 3")
    text = (Path.cwd() / kept.FILE).read_text()
    assert text.count("def real_slots") == 1 and "slot + 0" in text and "class Small(mine.Cache)" in text
    parts._parts.clear()
    assert mine.part("real_slots") is not check.EXERCISES["real_slots"].right  # a class does no harm


@pytest.mark.parametrize("text", ["def real_slots(", "1 / 0\ndef real_slots(seen, window): pass", "\0"])
def test_a_spoilt_file_leaves_the_courses_and_says_so(cell, text, capsys):
    (Path.cwd() / kept.FILE).write_text(text)
    assert mine.part("real_slots") is check.EXERCISES["real_slots"].right
    assert "the course's real_slots is used" in capsys.readouterr().out
    cell(RIGHT)
    assert mine.part("real_slots")(1, 2) == [False, True]
    if not text.startswith("1 / 0"):  # what is no Python is kept beside
        assert (Path.cwd() / "my_cache.bak.py").read_text() == text


NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
GROWN = {"append": 3, "attend": 9, "real": 3, "store": 4, "snapkv": 5, "__init__": 6, "bring": 6, "ahead": 7}
GROWN |= {"score": 8}  # method -> the chapter whose text the file has in the end


def own_parts(chapter: int) -> list[str]:
    """What a chapter's cells define and keep, cell by cell: the learner's functions and classes."""
    (path,) = NOTEBOOKS.glob(f"{chapter:02}_*.ipynb")
    found = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = kept.plain("".join(cell["source"]))
        if cell["cell_type"] == "code" and "mine.keep(" in text:
            parts = {ast.get_source_segment(text, one): one for one in ast.parse(text).body}
            named = {part: f"mine.keep({getattr(one, 'name', None)})" for part, one in parts.items()}
            found.append("\n\n".join(part for part in parts if named[part] in text or "mine.keep(" in part))
    return found


def test_one_class_grows_through_the_chapters_and_the_doctor_tries_it(
    cell, model, tokenizer, tmp_path, monkeypatch, capsys
):
    scope = {"model": model, "skew": skew, "Keep": Keep, "ThreadPoolExecutor": ThreadPoolExecutor}
    texts = {}
    for chapter in range(1, 10):
        for number, part in enumerate(own_parts(chapter)):
            texts[chapter] = texts.get(chapter, "") + part
            scope |= cell(part, f"chapter {chapter}, cell {number}", scope)
    text = (tmp_path / kept.FILE).read_text()
    assert text.count("class MyCache(") == 1
    methods = kept.methods("class MyCache" + text.partition("class MyCache")[2].partition("\n\n\n")[0])
    assert {*methods} == {*GROWN}
    for name, chapter in GROWN.items():
        assert all(line in texts[chapter] for line in methods[name].splitlines() if "###" not in line), name
    full = mine.clause17(model, tokenizer, mine.MyCache)
    given = {"keep": "snapkv", "budget": 0.2, "bits": 4, "host": True, "fetch": 0.2, "turns": skew(model)}
    assert full == mine.clause17(model, tokenizer, type("MyCache", (mine.MyCache,), given)) == 6
    monkeypatch.syspath_prepend(tmp_path)
    settings = "keep=snapkv,budget=0.4,bits=4,page=16,host=true", "fetch=0.2", "pages=2,page=16", "window=64"
    for method in ("NormKeep:budget=0.4", "MyCache", *(f"MyCache:{given}" for given in settings)):
        code = trial.run(f"my_cache.{method}")
        assert (said := capsys.readouterr().out).count("[ok]") >= 4 and code == 0, said


def test_what_was_rounded_is_not_rounded_again():
    cache, rows = type("Rounds", (mine.Cache,), {"bits": 2})(), torch.randn(2, 3, 101, 16)
    for start, end in [(0, 90), *((at, at + 1) for at in range(90, 101))]:
        held = [x[0].clone() for x in (cache.K, cache.V) if x]
        cache.attend(0, rows[0][:, start:end], *(x[:, start:end] for x in rows))
        cache.seen += end - start
        if held:
            whole = start // mine.BLOCK * mine.BLOCK
            assert torch.equal(cache.K[0][:, :whole], held[0][:, :whole])
            assert torch.equal(cache.V[0][:, :start], held[1])
    expected = torch.stack([mine.part("kivi_keys")(head, 2, mine.BLOCK) for head in rows[0]])
    assert torch.equal(cache.K[0], expected)


def test_a_cache_that_held_nothing_gets_an_append(cell):
    cell("class MyCache(mine.Cache):\n    def append(self, layer, k, v): pass\n\nmine.keep(MyCache)")
    cache = mine.MyCache()
    cache.append(0, torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    assert cache.stats().device_bytes == 2 * 2 * 3 * 4


def test_a_class_that_stops_decodes_with_the_methods_before(cell, model, tokenizer, capsys):
    asked = "check.clause17(model, tokenizer, MyCache)\nMyCache = mine.keep(MyCache)"
    lines = "    keep, budget = 'snapkv', 120\n\n    def snapkv(self, layer, q):\n        return ...\n"
    known = {"model": model, "tokenizer": tokenizer}
    made = cell(f"class MyCache(mine.MyCache):\n{lines}\n{asked}", known=known)["MyCache"]
    assert "as it was" in capsys.readouterr().out and not (Path.cwd() / kept.FILE).exists()
    answered, stats = mine.answered(model, tokenizer, made)
    assert answered == 6 and stats.tokens_held < 150  # its settings, and the course's snapkv


def test_bits_that_nobody_rounded_to_are_not_counted():
    class Claims(mine.Cache):
        bits = 4

        def store(self, layer):
            pass

    sizes = []
    for made in (mine.Cache, Claims, type("Rounds", (mine.Cache,), {"bits": 4})):
        cache, rows = made(), torch.randn(2, 3, 96, 64)
        cache.attend(0, rows[0], *rows)
        sizes.append(cache.stats().device_bytes)
    assert sizes[0] == sizes[1] > 5 * sizes[2]


class Codes(mine.Cache):
    bits, many = 4, 1  # levels that are left out

    def store(self, layer):
        before, V = self.rounded.get(layer, 0), self.V[layer]
        super().store(layer)
        new, largest = V[:, before:], 2 ** (self.bits - 1) - 1
        step = new.abs().amax(-1, keepdim=True).clamp_min(1e-7) / largest * self.many
        values = mine.part("to_codes")(new, step, largest) * step
        self.V[layer] = torch.cat([V[:, :before], values], dim=1)


class Far(mine.Cache):
    host, fetch, far = True, 0.1, None

    def ahead(self, layer, guess):
        if layer >= 2:
            alpha = self.far or self.alpha
            self.wanted[layer] = mine.part("choose")(
                *self.given(layer, guess), self.part, alpha, self.cap(layer)
            )


class Forgets(mine.Cache):
    first = 0  # tokens that no query sees

    def read(self, layer, q):
        return self.K[layer][:, self.first :], self.V[layer][:, self.first :]


@pytest.mark.parametrize(
    "kind, slip, turned",
    [(Codes, {"many": 7}, {}), (Far, {"far": 1e9}, {"alpha": 0.5}), (Forgets, {"first": 1}, {})],
)
def test_a_cache_that_answers_with_other_numbers_is_incorrect(
    kind, slip, turned, loaded, capsys, monkeypatch
):
    """Three levels of four bits, no bound of the score, a token that is not seen. Of one lease."""
    leases = lease.asked_of_workshop()[:1]
    monkeypatch.setattr(lease, "asked_of_workshop", lambda: leases)
    kind.turns = skew(loaded[0])
    check.clause17(*loaded, kind, right=1, turned=turned)
    assert capsys.readouterr().out.endswith("correct: your cache answers 1 of 6 leases\n")
    check.clause17(*loaded, type("Slip", (kind,), slip), right=1, turned=turned)
    assert "its numbers are not the course's: what does your line do?" in capsys.readouterr().out


def keeps(who: str, folder: Path) -> None:
    """A notebook in this folder that keeps twelve functions."""
    os.chdir(folder)
    for number in range(12):
        name = f"part_{who}_{number}"
        text = f"def {name}():\n    return {number}\n"
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        scope = {}
        exec(compile(text, name, "exec"), scope)
        mine.keep(scope[name])


def test_notebooks_that_keep_at_once_lose_nothing(cell, tmp_path):
    fork = multiprocessing.get_context("fork")  # which need not import anything
    both = [fork.Process(target=keeps, args=(who, tmp_path)) for who in "ab"]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    assert {node.name for node in kept.read()[1]} == {f"part_{who}_{n}" for who in "ab" for n in range(12)}
    assert not list(tmp_path.glob("*.lock"))
