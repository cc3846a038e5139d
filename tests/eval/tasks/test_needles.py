"""Documents of the asked length, whose answers stand in them once, and which a perfect writer gets right."""

import random

import pytest

from eval.command import main
from eval.tasks import needles


@pytest.mark.parametrize("kind", needles.KINDS)
@pytest.mark.parametrize("length", [600, 1500])
def test_a_row_fits_and_holds_its_answers(loaded, kind, length):
    tokenizer = loaded[1]
    for number in range(3):
        row = needles.row(kind, number, length, tokenizer)
        context, question = row["input"].split("\nQuestion: ")
        tokens = len(tokenizer(row["input"]).input_ids)
        assert tokens <= length - needles.MARGIN + 4 and tokens > 0.8 * length - needles.MARGIN
        assert question.endswith("?\nAnswer:") and len(set(row["outputs"])) == len(row["outputs"])
        assert all(output in context and output not in question for output in row["outputs"])
        assert needles.row(kind, number, length, tokenizer) == row
        assert needles.scored(row, [", ".join(row["outputs"])]) == {"acc": 1.0}
        assert needles.scored(row, ["nothing"]) == {"acc": 0.0}


def test_a_copy_comes_after_its_original():
    facts, question, names = needles.tracking(random.Random(1))
    places = [next(i for i, fact in enumerate(facts) if fact.startswith(name)) for name in names]
    assert places == sorted(places) and facts[places[0]].split()[-1].rstrip(".") in question


def test_too_short_a_length_is_refused(loaded):
    with pytest.raises(ValueError, match="too few"):
        needles.row("multikey", 0, 60, loaded[1])


def test_they_run_under_two_protocols(folder, tmp_path, capsys):
    words = f"accuracy --model {folder} --jobs 0 --limit 2 --methods full snapkv --tasks needles_single --out"
    told = ["--metadata", '{"lengths": [300], "documents": 2}']
    for protocol in ("question-inside", "context-first"):
        out = str(tmp_path / protocol)
        assert main([*words.split(), out, *told, "--protocol", protocol]) == 0
        assert "2/2" in capsys.readouterr().err
