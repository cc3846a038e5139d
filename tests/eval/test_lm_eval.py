"""lm-eval as its users know it: its own command line with our model, and its options on ours."""

import json
import multiprocessing
import random
from pathlib import Path

import pytest
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager

from eval.accuracy import KVLabLM
from eval.accuracy.prefill import Prompt
from eval.command import main
from eval.core.results import Store

TASK = """task: my_fact
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{facts}}}} ASK {{{{ask}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
metadata:
  version: 1.0
  context_until: " ASK"
"""
ROWS = [
    {
        "facts": "The dog is Otis. The hen is Ada.",
        "ask": "the dog is",
        "choices": ["Otis", "Ada"],
        "label": 0,
    },
    {"facts": "The cow is Tom. The pig is Mia.", "ask": "the pig is", "choices": ["Tom", "Mia"], "label": 1},
]


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """A user's folder with a task of their own and its rows."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "my_fact.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))
    return folder


def run(mine, folder, out, *words: str, method="h2o:budget=0.5,recent=0.5") -> int:
    about = f"pretrained={folder},method={method},protocol=context-first"
    command = ["lm-eval", "run", "--model", "kvlab", "--model_args", about, "--include_path", str(mine)]
    return main([*command, "--tasks", "my_fact", "--output_path", str(out), "--log_samples", *words])


def samples(out: Path) -> list[dict]:
    (file,) = out.rglob("samples_my_fact*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lm_evals_own_command_line(mine, folder, tmp_path, loaded):
    """Its samples hold what the class says."""
    assert run(mine, folder, tmp_path / "a") == 0
    a = [float(r[0][0]) for row in samples(tmp_path / "a") for r in row["resps"]]
    lm = KVLabLM(loaded[0], "h2o:budget=0.5,recent=0.5", tokenizer=loaded[1], protocol="context-first")
    lm.untils["my_fact"] = " ASK"
    task = TaskManager(include_path=str(mine), include_defaults=False).load(["my_fact"])["tasks"]["my_fact"]
    task.build_all_requests(limit=None, rank=0, world_size=1)
    assert [score for score, _ in lm.loglikelihood(task.instances)] == pytest.approx(a, abs=1e-3)


def test_a_tokenizer_beside_the_name_of_a_model(folder):
    """HFLM would load it; here a model that is named has its own."""
    KVLabLM(str(folder), tokenizer=str(folder))
    with pytest.raises(ValueError, match="tokenizer='other': a named model has its own; load both"):
        KVLabLM(str(folder), tokenizer="other")


def test_answers_that_may_be_another_methods_are_refused(mine, folder, tmp_path, capsys):
    assert run(mine, folder, tmp_path / "a", "--use_cache", str(tmp_path / "kept")) == 2
    assert "error: --use_cache: lm-eval knows kept answers by their text alone" in capsys.readouterr().err
    with pytest.raises(ValueError, match="use_cache: lm-eval knows kept answers by their text alone"):
        CachingLM(KVLabLM(str(folder), "int4"), str(tmp_path / "kept.db"))


@pytest.fixture
def ours(folder, tmp_path):
    """Words of a quick run of our own command."""
    words = ["accuracy", "--model", str(folder), "--jobs", "0", "--out", str(tmp_path / "out")]
    return [*words, "--methods", "full"]


def cells(tmp_path) -> dict[str, dict]:
    """The newest of each task."""
    files = sorted((tmp_path / "out" / "cells").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(path.read_text()) for path in files]
    return {cell["task"]: cell for cell in found}


def logged(tmp_path, cell: dict) -> list[dict]:
    return Store(tmp_path / "out").samples(cell)


def test_a_users_own_task_on_our_command(mine, ours, tmp_path, capsys):
    """Named in a folder or as a file, cut where its YAML says, its samples kept, its rows in the digest."""
    words = [*ours, "--protocol", "context-first", "--log-samples", "whole"]
    assert main([*words, "--include-path", str(mine), "--tasks", "my_fact"]) == 0
    cell = cells(tmp_path)["my_fact"]
    assert cell["config"]["protocol"] == "context-first" and cell["config"]["evict"] == "once"
    assert [one["gold"] for one in logged(tmp_path, cell)] == ["Otis", "Mia"]
    assert "The dog is Otis" in json.dumps(logged(tmp_path, cell))
    printed = capsys.readouterr()
    assert "protocol context-first, eviction once" in printed.out
    assert "Protocol context-first" in (tmp_path / "out" / "report.html").read_text()
    assert main([*words, "--tasks", str(mine / "my_fact.yaml")]) == 0
    assert "1 of 1 accuracy cells are kept" in capsys.readouterr().err
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *ROWS[:1]]))
    data = ["--data", f"my_fact={tmp_path / 'more.jsonl'}"]
    assert main([*words, "--include-path", str(mine), "--tasks", "my_fact", *data]) == 0
    assert cells(tmp_path)["my_fact"]["metrics"][0]["n"] == 3


def test_rows_of_ones_own_for_a_task_of_lm_eval(ours, tmp_path):
    rows = [{"goal": f"cool tea {i}", "sol1": "wait", "sol2": "boil it", "label": 0} for i in range(4)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*ours, "--tasks", "piqa", "--data", f"piqa={tmp_path / 'piqa.jsonl'}", "--num-fewshot", "2"]
    words += ["--samples", '{"piqa": [0, 2, 3]}']
    assert main([*words, "--protocol", "context-first", "--log-samples", "whole"]) == 0
    cell = cells(tmp_path)["piqa"]
    assert cell["metrics"][0]["n"] == 3 and cell["config"]["task"] != ""
    assert cell["floor"]["n"] == 3 and cell["floor"]["metric"] == "acc"  # full, without the shots
    told = logged(tmp_path, cell)
    assert [one["doc_id"] for one in told] == [0, 2, 3]
    for one in told:  # a row is never among its own shots
        assert one["prompt"].count(f"cool tea {one['doc_id']}\n") == 1


def test_all_methods_are_asked_behind_the_same_shots_which_pass_once(folder, tmp_path, monkeypatch):
    """A task draws its shots whenever it is asked; methods behind other shots would not be comparable."""
    made, prompt = [], Prompt.__init__

    def counted(self, model, ids, *given):
        made.append(len(ids))
        prompt(self, model, ids, *given)

    monkeypatch.setattr(Prompt, "__init__", counted)
    rows = [{"goal": f"cool tea {i}", "sol1": "wait", "sol2": "boil it", "label": 0} for i in range(9)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"accuracy --model {folder} --jobs 0 --out {tmp_path / 'out'} --log-samples whole".split()
    words += ["--tasks", "piqa", "--data", f"piqa={tmp_path / 'piqa.jsonl'}", "--num-fewshot", "2"]
    assert main([*words, "--methods", "full,int8,sinks", "--limit", "4"]) == 0
    found = [json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").glob("*.json")]
    first, *others = [[one["prompt"] for one in logged(tmp_path, cell)] for cell in found]
    assert len(others) == 2 and all(one == first for one in others)
    assert sum(made) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "prose", "--protocol", "context-first"], "no context to compress"),
        (["--tasks", "agreement", "--protocol", "reuse"], "no question"),
        (["--tasks", "recall", "--data", "recall"], "TASK=FILE"),
        (["--tasks", "recall", "--data", "piqa=rows.jsonl"], "not among --tasks"),
        (["--tasks", "recall", "--model-args", "batch=3"], "max_length"),
        (["--tasks", "recall", "--apply-chat-template"], "no chat template"),
        (["--tasks", "recall", "--metadata", "{1"], "JSON"),
        (["--tasks", "recall", "--metadata", '{"lengths": [1024]}'], "--metadata lengths: none of the tasks"),
        (["--tasks", "recall", "--context-until", "WHO"], "expected protocol context-first"),
        (
            ["--tasks", "recall", "--context-until", " ", "--protocol", "context-first"],
            "cut of task recall is known",
        ),
        (["--tasks", "recall", "--model-args", "max_length=0"], "max_length=0: expected a number of tokens"),
        (["--tasks", "taken.yaml"], "task recall: kvlab has a task of this name"),
    ],
)
def test_bad_input_is_one_line(ours, refused, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = TASK.format(rows=tmp_path / "rows.jsonl").replace("my_fact", "recall")
    (tmp_path / "taken.yaml").write_text(task)
    assert said in refused(*ours, *words)
    assert not list((tmp_path / "out").glob("cells/*.json"))


PIQA = {"goal": "cool tea", "sol1": "wait", "sol2": "boil it", "label": 0}
TASKS = ("recall", "hellaswag")  # a prompt by its bare name, and a function that reads a field
TEXTS = {
    "broken": (json.dumps(PIQA) + '\n{"goal":\n', "line 2: this is no JSON (Expecting value)"),
    "empty": ("\n", "this file has no rows"),
    "lists": ("[1, 2]\n", "line 1: expected a JSON object, got '1'"),
    "words": (f'{json.dumps(PIQA)}\n\n"a"\n', "line 3: expected a JSON object, got 'a'"),
    "recall": ('{"contxt": "a", "choices": ["a"], "label": 0}', "line 1: the task needs a field 'context'"),
    "hellaswag": ('{"ctx_a": "a"}', "line 1: the task needs a field 'ctx_b'"),
    "other": (json.dumps(ROWS[0]), "line 1: the task needs a field 'goal'; the row has"),
    "lacks": (
        json.dumps(PIQA) + '\n{"goal": "x", "sol1": "a", "label": 0}',
        "line 2: the task needs a field 'sol2'",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_rows_that_a_task_cannot_read_are_one_line(ours, refused, tmp_path, name):
    """With file and line, before anything is computed."""
    file, (text, said), task = tmp_path / "rows.jsonl", TEXTS[name], name if name in TASKS else "piqa"
    file.write_text(text)
    line = refused(*ours, "--tasks", task, "--data", f"{task}={file}")
    assert line.startswith(f"error: --data {task}={file}: {said}"), line
    assert not list((tmp_path / "out").glob("cells/*.json"))


@pytest.mark.parametrize("field", ["label", "choices", "context", "note"])
def test_a_row_of_which_no_question_is_made_is_one_line(ours, refused, tmp_path, field):
    """lm-eval finds out when the models have answered, or counts the row as wrong."""
    odd = {"label": (7, -1, None), "choices": ([], "ab", ["a", None]), "context": (None,)}
    odd["note"] = ("\ud800",)
    row = {"context": "Ada has a hen.\nQuestion: Ada has", "choices": ["a hen", "a cat"], "label": 0}
    rows = [row, row, row | {field: random.choice(odd[field])}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    line = refused(*ours, "--tasks", "recall", "--data", f"recall={file}")
    assert line.startswith(f"error: --data recall={file}: line 3: "), line


@pytest.mark.parametrize("twice", [False, True])
def test_more_shots_than_other_rows_are_one_line(ours, refused, tmp_path, twice):
    file = tmp_path / "rows.jsonl"
    rows = [PIQA | {"goal": f"tea {at}"} for at in range(3)]
    file.write_text("\n".join(map(json.dumps, rows + rows[:1] * twice)))
    words = ["--tasks", "piqa", "--data", f"piqa={file}", "--num-fewshot", "3"]
    assert "piqa: 3 shots need as many other rows, and one has 2" in refused(*ours, *words)


@pytest.mark.parametrize("relative", [True, False])
def test_rows_are_asked_as_they_are_written(ours, tmp_path, relative, monkeypatch):
    """Where all rows have one, `datasets` reads a date as a time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    text = TASK.format(rows="/nowhere.jsonl").replace("{{facts}}", "On {{first}}: {{facts}}")
    (tmp_path / "tasks" / "my_fact.yaml").write_text(text)
    rows = [row | {"first": f"2020-01-0{at}", "more": {"at": at}} for at, row in enumerate(ROWS, 1)]
    Path("when.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--include-path", "tasks" if relative else str(tmp_path / "tasks"), "--tasks", "my_fact"]
    assert main([*ours, *words, "--data", "my_fact=when.jsonl", "--log-samples", "whole"]) == 0
    asked = [one["prompt"] for one in logged(tmp_path, cells(tmp_path)["my_fact"])]
    assert [prompt[:15] for prompt in asked] == ["On 2020-01-01: ", "On 2020-01-02: "]


FIELDS = [  # of three rows: a column of a table has one type, and no empty struct
    (2.5, 2, True), (1, "x", None), ({}, {"a": 1}, {"b": [{}]}),
    ("2020-01-01", "2020-01-02T00:00:00+02:00", "z"), (2**63, 2**53 + 1, 0.5), ([], [1], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize("process", ["", "process_docs: !function own.same\n"])
def test_every_row_has_the_fields_that_it_was_given(ours, tmp_path, process):
    """Also for functions of a task."""
    (tmp_path / "own.py").write_text("def same(rows):\n    return rows.map(lambda row: row)\n")
    shown = "".join(f"{{{{f{at}}}}} | " for at in range(len(FIELDS)))
    text = TASK.format(rows="/nowhere.jsonl").replace("{{facts}}", f"{shown}{{{{facts}}}}")
    (tmp_path / "my_fact.yaml").write_text(f"{text}{process}")
    rows = [ROWS[0] | {f"f{at}": one[row] for at, one in enumerate(FIELDS)} for row in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["--tasks", str(tmp_path / "my_fact.yaml"), "--data", f"my_fact={file}", "--log-samples", "whole"]
    assert main([*ours, *words]) == 0
    asked = [one["prompt"] for one in logged(tmp_path, cells(tmp_path)["my_fact"])]
    for row, prompt in enumerate(asked):
        assert prompt.startswith("".join(f"{one[row]} | " for one in FIELDS)), prompt


def test_a_number_that_is_no_longer_itself_is_one_line(ours, refused, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PIQA | {"id": 2**65}))
    assert "line 1: id is read as '36893" in refused(*ours, "--tasks", "piqa", "--data", f"piqa={file}")


def test_lambada_forks_nothing_and_its_words_come_first(ours, tmp_path, monkeypatch):
    """lm-eval forks the process for the standard error of a perplexity, and has hung there."""
    monkeypatch.setattr(multiprocessing, "Pool", lambda *told: pytest.fail("a process was forked"))
    rows = [{"text": f"The hen slept. Then it woke and saw {name}"} for name in ("Otis", "Ada")]
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*ours, "--tasks", "lambada_openai", "--data", f"lambada_openai={tmp_path / 'lambada.jsonl'}"]
    assert main([*words, "--protocol", "context-first"]) == 0
    cell = cells(tmp_path)["lambada_openai"]
    assert [one["metric"] for one in cell["metrics"]] == ["acc", "perplexity"]
    assert cell["metrics"][1]["stderr"] > 0 and cell["chance"] == 0


def test_a_cell_knows_the_shots_that_its_task_fixes(mine, ours, tmp_path):
    task = TASK.format(rows=mine / "rows.jsonl").replace("my_fact", "my_shots")
    (tmp_path / "my_shots.yaml").write_text(f"{task}num_fewshot: 1\nfewshot_split: test\n")
    assert main([*ours, "--tasks", str(tmp_path / "my_shots.yaml")]) == 0
    cell = cells(tmp_path)["my_shots"]
    assert cell["shots"] == 1 and cell["config"]["num_fewshot"] is None
