"""Tables of documents: every method once, marks where they belong, nothing compared where full guesses."""

import math

import pytest

from eval.report.perplexity import against_bits
from eval.reproduce import documents, tables

MISSING = "Not made yet: `make reproduce` makes it."
SHARES = {f"{name}_bytes_of_full": 0.2 for name in ("device", "host", "moved")}
STANDS = {"model": "m", "model_digest": "d", "dtype": "float32", "machine": "a machine", "torch": "2",
          "n": 40, "code_digest": "c", "chance": 0.25, "floor": None}  # fmt: skip


def row(protocol, method, budget, value, task="recall", **more):
    told = {"protocol": protocol, "method": method, "curve": method.partition(":")[0], "budget": budget}
    told |= {"task": task, "value": value, "stderr": 0.05, "differs": False, "compared": True}
    told |= {"scored": None, "p": 1.0}
    return STANDS | SHARES | told | more


ROWS = [
    row("context-first", "full", None, 0.9, floor=0.4),
    row("context-first", "h2o:budget=0.1", 0.1, 0.3, differs=True, scored=0.4),
    row("context-first", "h2o:budget=0.2", 0.2, 0.5, differs=True, scored=0.6),
    row("question-inside", "full", None, 0.8),
]


@pytest.fixture()
def stored(monkeypatch):
    monkeypatch.setattr(tables, "study", lambda name: ROWS if name != "nothing" else [])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_methods_by_protocols_at_one_budget(stored):
    lines = tables.accuracy("passages", "0.2").splitlines()
    assert cells(lines[0])[1:3] == ["recall, context-first", "recall, question-inside"]
    found = {cells(line)[0]: cells(line)[1:] for line in lines[2:] if line.startswith("|")}
    assert found["`full`"][:2] == ["90.0 ± 5.0", "80.0 ± 5.0"]
    assert cells(lines[0])[3] == "bytes held, context-first / question-inside"
    assert found["`h2o`"] == ["50.0* ± 5.0", "–", "20 % + 20 % on the host / –", "20 % / –"]
    assert found["guessing"][:2] == ["25.0", "25.0"] and found["`full`, 0 shots"][:2] == ["40.0", "–"]
    assert "recall 40" in lines[-1] and lines[-1].endswith("(McNemar, p < 0.05); a machine, torch 2, code c.")


def test_a_table_marks_a_rule_and_names_the_test(monkeypatch):
    """As a curve does; and a task whose scores are shares is compared by standard errors."""
    shares = [row("context-first", "full", None, 0.4, "chain", p=None), ROWS[0], *ROWS[1:2]]
    monkeypatch.setattr(tables, "study", lambda name: shares)
    *_, h2o, _, _, _, last = tables.accuracy("it", "0.1").splitlines()
    assert cells(h2o)[:3] == ["`h2o`", "–", "30.0* ± 5.0 !"]
    assert "(McNemar, p < 0.05; chain: two standard errors of the paired difference); ! a rule held" in last


def test_budget_by_budget(stored):
    lines = tables.curves("passages", "recall", "context-first").splitlines()
    assert [cells(line) for line in (lines[0], lines[2])] == [
        ["`full`: 90.0 ± 5.0", "10 %", "20 %"], ["`h2o`", "30.0* ± 5.0 !", "50.0* ± 5.0"],
    ]  # fmt: skip


def test_three_models_side_by_side(stored, monkeypatch):
    lines = tables.beside("0.2", "recall").splitlines()
    models = ("workshop", "workshop-opt", "SmolLM2")
    assert cells(lines[0])[1:4] == [f"recall, context-first: {model}" for model in models]
    assert cells(lines[3])[0] == "guessing"  # h2o has no cell of the other protocol
    told = [row("context-first", "full", None, 0.9), ROWS[1]]
    monkeypatch.setattr(tables, "study", lambda name: told)
    assert cells(tables.beside("0.1", "recall").splitlines()[3]) == ["`h2o`", *["30.0* ± 5.0 !"] * 3]


def test_where_full_guesses_it_is_said(monkeypatch):
    monkeypatch.setattr(
        tables, "study", lambda name: [row("context-first", "full", None, 0.3, compared=False)]
    )
    assert "full does not beat guessing on recall, so no method is compared there" in tables.accuracy(
        "passages"
    )


def test_perplexity_is_compared_at_the_end_of_a_chunk(monkeypatch):
    places = [{"position": 0, "loss": 1.0}, {"position": 32, "loss": 2.0}]
    worse = [{"position": 0, "loss": 1.0}, {"position": 32, "loss": 2.5}]
    one = STANDS | {"perplexity": 4.5, "values": [1.5, 1.5], "chunk": 64, "prompt": 48, "dtype": None}
    told = [
        one | {"method": "full", "rows": places},
        one | {"method": "int2", "rows": worse, "values": [1.7, 1.9]},
    ]
    monkeypatch.setattr(tables, "study", lambda name: told)
    lines = tables.perplexity().splitlines()
    assert cells(lines[3]) == ["`int2`", "4.5", "+0.500 ± 0.100"]
    assert lines[-1].startswith("m (digest d), float32; 2 chunks of 64 tokens, of which the last 16 are ")


def test_formats_stand_by_the_bits_that_they_take(monkeypatch):
    sizes = {"int4": (1.5, 0.2, 100), "full": (1.0, 0.0, 800), "int8": (1.1, 0.0, 200)}
    shared = STANDS | {"limit": 2, "chunk": 64, "prompt": 48, "scored": None}
    told = [
        shared | {"method": method, "perplexity": math.exp(loss), "values": [loss, loss + extra],
                  "bytes": {"device_bytes": size}}
        for method, (loss, extra, size) in sizes.items()
    ]  # fmt: skip
    monkeypatch.setattr(tables, "study", lambda name: told)
    found = [cells(line) for line in tables.formats().splitlines()[2:5]]
    assert [line[:2] for line in found] == [["`full`", "32"], ["`int8`", "8"], ["`int4`", "4"]]
    assert found[2][2:] == ["4.482", "+0.500 ± 0.100"]
    figure = against_bits(told)
    assert {text.get_text() for text in figure.axes[0].texts} == {"int8", "int4"}


def test_questions_by_what_the_compression_knew(monkeypatch):
    told = [row(protocol, "full", None, 0.9, "recall_many") for protocol in ("reuse", "many-questions")]
    told.append(row("reuse", "h2o:budget=0.2", 0.2, 0.5, "recall_many", differs=True))
    told.append(row("reuse", "full", None, 0.8, "recall_many", model="other", n=20))
    monkeypatch.setattr(tables, "study", lambda name: told)
    head, _, full, h2o, guess, _, last = tables.reuse().splitlines()
    assert cells(head) == ["method", "m, many-questions", "m, reuse", "other, reuse"]
    assert cells(full)[1:4] == ["90.0 ± 5.0", "90.0 ± 5.0", "80.0 ± 5.0"]
    assert cells(h2o) == ["`h2o`", "–", "50.0* ± 5.0", "–"]
    assert cells(guess)[1:] == ["25.0", "25.0", "25.0"]
    assert last.startswith("m (digest d), float32, 40 questions; other (digest d), float32, 20 questions; ")


def test_bytes_are_never_averaged_across_protocols(monkeypatch):
    held = {"device_bytes_of_full": 0.4, "host_bytes_of_full": 0.0}
    told = [*ROWS, row("question-inside", "h2o:budget=0.2", 0.2, 0.6, **held)]
    monkeypatch.setattr(tables, "study", lambda name: told)
    line = next(line for line in tables.accuracy("it").splitlines() if line.startswith("| `h2o`"))
    assert cells(line)[-2:] == ["20 % + 20 % on the host / 40 %", "20 %"]


def test_what_a_context_costs(monkeypatch):
    """Contexts, tokens and seconds for one, the shared prefill among them; a dash where nobody counted."""
    counted = {"contexts": 4, "prefilled_tokens": 400, "seconds": 3.0, "prefill_seconds": 1.0}
    told = [
        row("many-questions", "full", None, 0.9, "recall_many", **counted),
        row("many-questions", "h2o:budget=0.2", 0.2, 0.5, "recall_many", seconds=3.0),
        row("reuse", "h2o:budget=0.2", 0.2, 0.5, "recall_many", **counted),
    ]
    monkeypatch.setattr(tables, "study", lambda name: told)
    head, _, full, h2o, _, last = tables.costs("reuse", "many-questions").splitlines()
    assert cells(head)[-3:] == ["contexts", "tokens prefilled per context", "seconds per context"]
    assert cells(full)[-3:] == ["4", "100", "1"] and cells(h2o)[-3:] == ["–", "–", "–"]
    assert last == "m (digest d), float32, recall_many; a machine, torch 2, code c."
    assert tables.costs("reuse", "many-questions", "another") == MISSING


def test_perplexity_by_bands_of_positions(monkeypatch):
    def one(method, losses, size):
        places = [{"position": 48 + 32 * i, "tokens": 32, "loss": loss} for i, loss in enumerate(losses)]
        told = {"method": method, "rows": places, "bytes": {"device_bytes": size}, "values": [1.0, 2.0]}
        return STANDS | told | {"chunk": 144, "prompt": 48}

    told = [one("full", [0.0, 1.0, 2.0], 100), one("sinks", [0.0, 1.0, 1.0], 25)]
    monkeypatch.setattr(tables, "study", lambda name: told)
    head, _, full, sinks, _, last = tables.lengths("beyond", "64").splitlines()
    assert cells(head) == ["method", "0 to 63", "64 to 127", "bytes held"]
    assert cells(full) == ["`full`", "1", "4.482", "100 %"] and cells(sinks)[2:] == ["2.718", "25 %"]
    assert "2 chunks of 144 tokens, of which the first 48 are prefilled" in last


@pytest.mark.parametrize(
    "shots, said", [((0, 0), ", 0 shots"), ((5, 5), ", 5 shots"), ((5, 0), ", 0 or 5 shots"), ((None, 5), "")]
)
def test_shots_are_said_where_every_row_knows_them(monkeypatch, shots, said):
    tasks = zip(("recall_many", "piqa"), shots, strict=True)
    told = [row("question-inside", "full", None, 0.9, task, shots=count) for task, count in tasks]
    monkeypatch.setattr(tables, "study", lambda name: told)
    assert f"float32{said}; documents: " in tables.accuracy("it").splitlines()[-1]
    assert f" questions;{said.lstrip(',')}{',' * bool(said)} recall_many; " in tables.reuse().splitlines()[-1]


def test_a_study_that_was_not_made_is_said(stored):
    assert tables.reuse("nothing") == tables.lengths("nothing") == MISSING
    for found in (tables.accuracy("nothing"), tables.curves("nothing", "recall", "context-first")):
        assert found == MISSING
    text = "a\n<!-- results: curves nothing recall x -->\nold\n<!-- end of results -->\nb"
    assert documents.filled(text).splitlines()[2] == MISSING
