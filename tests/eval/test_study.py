"""A file says what a command line does; lm-eval's spellings of options are ours; a run is one such file."""

import json
import shutil

import pytest

from eval.accuracy import settings
from eval.accuracy.accuracy import NOT_KEPT
from eval.accuracy.samples import gold
from eval.accuracy.taskset import load
from eval.command import chosen, keep_earlier, main
from eval.core.errors import Problem
from eval.core.results import Store
from eval.core.study import expanded, said


def alike(*words: str, file=None):
    return [vars(one) for one in chosen(words)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--num_fewshot", "5"], ["--num-fewshot", "5"]),
        (["--num_fewshot=5"], ["--num-fewshot=5"]),
        (["--model_args", "pretrained=X,dtype=bfloat16"], ["--model", "X", "--dtype", "bfloat16"]),
        (["--model", "hf", "--model_args", "pretrained=a/b_c"], ["--model", "a/b_c"]),
        (
            ["--model_args", "pretrained=X,device=cpu,max_length=99"],
            ["--model", "X", "--device", "cpu", "--model-args", "max_length=99"],
        ),
        (["--samples", '{"recall": [0, 2]}'], ["--samples", '{"recall": [0, 2]}']),
        (["--write_out"], ["--write-out"]),
        (["--batch_size", "8"], ["--batch-size", "8"]),
        (["--batch_size", "auto"], []),
        (["--batch_size", "auto:4"], ["--batch-size", "64"]),
        (["--apply_chat_template"], ["--apply-chat-template"]),
        (["--gen_kwargs", "max_gen_toks=4"], ["--gen-kwargs", "max_gen_toks=4"]),
        (["--log_samples"], ["--log-samples", "whole"]),
        (["--log-samples", "short"], []),
        (["--output_path", "there"], ["--out", "there"]),
        (["--system_instruction", "a_b --c_d"], ["--system-instruction", "a_b --c_d"]),
        (["--include_path", "f_f"], ["--include-path", "f_f"]),
    ],
)
def test_lm_evals_spellings(theirs, ours):
    assert alike("accuracy", *theirs) == alike("accuracy", *ours)


STUDY = """
run: accuracy
model: smollm2
methods: [full, "h2o:budget=0.2,recent=0.5"]
tasks: recall,chain
budgets: [0.1, 0.2]
metadata: {max_seq_lengths: [1024]}
limit: 50
num_fewshot: 0
apply-chat-template: true
log_samples: none
fewshot_as_multiturn: false
system_instruction: "- say: nothing"
dtype:
"""
SAID = [
    "--model", "smollm2", "--methods", "full", "h2o:budget=0.2,recent=0.5", "--tasks", "recall", "chain",
    "--budgets", "0.1", "0.2", "--metadata", '{"max_seq_lengths": [1024]}', "--limit", "50", "--num-fewshot",
    "0", "--apply-chat-template", "--log-samples", "none", "--system-instruction=- say: nothing",
]  # fmt: skip


def test_a_file_says_what_the_command_line_does(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    file = str(tmp_path / "study.yaml")
    expected = alike("accuracy", *SAID)
    assert alike("--config", file) == alike("accuracy", "--config", file) == expected
    assert alike("accuracy", f"--config={file}") == expected
    again = alike("--config", file, "--limit", "3", "--tasks", "cloze")
    assert again == alike("accuracy", *SAID, "--limit", "3", "--tasks", "cloze")
    measurements = chosen(["accuracy", *SAID])  # a run.json is such a file
    (tmp_path / "run.json").write_text(json.dumps(said("accuracy", measurements, "python -m eval ...")))
    assert alike("--config", str(tmp_path / "run.json")) == expected
    (tmp_path / "all.json").write_text(json.dumps(said("all", chosen(["all", "--limit", "2"]), "")))
    assert alike("--config", str(tmp_path / "all.json")) == alike("all", "--limit", "2")


def test_no_is_a_word_except_in_a_mapping(tmp_path):
    (tmp_path / "study.yaml").write_text("run: accuracy\ntasks: [no]\nmetadata: {shuffle: off}\nlimit: on\n")
    said = expanded(["--config", str(tmp_path / "study.yaml")])
    assert said == ["accuracy", "--tasks", "no", '--metadata={"shuffle": false}', "--limit=on"]


def test_a_file_says_folders_too(tmp_path):
    (tmp_path / "merge.yaml").write_text("run: merge\nout: all\nfolders: [one, two]\n")
    file = str(tmp_path / "merge.yaml")
    expected = alike("merge", "one", "two", "--out", "all")
    assert alike("--config", file) == alike("merge", "--config", file) == expected
    assert alike("merge", "three", "--config", file) == alike("merge", "three", "--out", "all")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- a\n", "expected options, as name: value"),
        ("run: accuracy\nconfig: other.yaml\n", "and no further file"),
        ("a: [", "--config"),
        ("limit: 3\n", "it does not say what to run"),
        ("run: accuracy\nbugdets: 3\n", "unrecognized arguments: --bugdets=3"),
        ("run: accuracy\nlimit: many\n", "--limit"),
        ("run: accuracy\nlimit: 3\nlimit: 4\n", "it says 'limit' twice"),
        ("run: accuracy\nnum_fewshot: 3\nnum-fewshot: 4\n", "it says 'num_fewshot' twice"),
        ("run: accuracy\nmodel: truecase\n", "no tokenizer could be loaded from 'truecase'"),
        ("run: accuracy\nmodel: no\n", "no tokenizer could be loaded from 'no'"),
        ("run: accuracy\napply_chat_template: off\n", "ignored explicit argument 'off'"),
        ("run: accuracy\nmetadata: {version: 2026-11-30}\n", "--config: metadata: "),
        *((f"run: {one}\n", "expected a word") for one in (".nan", "true", "[[1]]", "{a: 1}", "2001-01-01")),
        (None, "No such file"),
    ],
)
def test_a_file_that_says_no_options_is_one_line(tmp_path, text, why, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a run begins a folder for its results
    if text is not None:
        (tmp_path / "study.yaml").write_text(text)
    assert main(["--config", str(tmp_path / "study.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and why in lines[0]
    with pytest.raises(Problem, match="expected a file"):
        expanded(["accuracy", "--config"])


def test_chosen_documents_and_the_first_prompt(folder, tmp_path, capsys, no_pictures):
    words = ["accuracy", "--model", str(folder), "--tasks", "recall", "--methods", "full", "--jobs", "0"]
    words += ["--out", str(tmp_path), "--samples", '{"recall": [5, 2, 2]}', "--write_out"]
    assert main(words) == 0
    (cell,) = Store(tmp_path).records()
    assert cell["metrics"][0]["n"] == 2 and cell["config"]["documents"] == [2, 5]
    found, task = Store(tmp_path).samples(cell), load("recall")["recall"]
    assert sorted(one["doc_id"] for one in found) == [2, 5]
    assert all(one["gold"] == gold(task, task.eval_docs[one["doc_id"]]) for one in found)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("recall: ")]
    assert len(shown) == 1 and repr(found[0]["prompt"]) in shown[0]
    assert main(["--config", str(tmp_path / "run.json")]) == 0
    assert "1 of 1 accuracy cells are kept" in capsys.readouterr().err
    assert not (tmp_path / "run-1.json").exists()
    shutil.rmtree(tmp_path / "samples")
    assert main(words) == 0
    assert f"recall: {NOT_KEPT}" in capsys.readouterr().err


def test_the_run_json_of_another_run_is_kept(tmp_path):
    for limit in (2, 2, 3, 2):
        said = {"command": "accuracy", "limit": limit}
        keep_earlier(tmp_path / "run.json", said)
        (tmp_path / "run.json").write_text(json.dumps(said))
    kept = {path.name: json.loads(path.read_text())["limit"] for path in tmp_path.iterdir()}
    assert kept == {"run-1.json": 2, "run-2.json": 3, "run.json": 2}


def test_shards_are_all_and_none_is_made_twice():
    made = []
    for tasks in (["recall"], ["recall", "chain", "cloze"]):
        for parts in range(1, 7):
            whole = chosen(["accuracy", "--tasks", *tasks, "--methods", "full", "int8", "h2o:budget=0.5"])[0]
            found = []
            for part in range(1, parts + 1):
                whole.shard = f"{part}/{parts}"
                found += whole.mine()
            made.append(len(found))
            assert len(found) == len(set(found)) == 3 * len(tasks)
    assert settings.shard(None) == (1, 1)


def test_metrics_whose_items_are_pairs_arrays_or_numpys_numbers_are_stored(folder, tmp_path, no_pictures):
    """Pairs and arrays belong to all documents together: two methods are not compared by them."""
    rows = [{"ctx": f"the dog ran {i} times to the", "label": i % 2} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "scored.py").write_text(
        "import numpy\n\n\ndef score(doc, said):\n"
        "    return {'acc': numpy.argmax([nats for nats, _ in said]) == doc['label']}\n"
    )
    for metric in ("f1", "mcc", "brier_score", "acc"):
        (tmp_path / f"{metric}.yaml").write_text(f"""
task: t_{metric}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {json.dumps(str(tmp_path / "rows.jsonl"))}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: [barn, river]
doc_to_target: label
metric_list: [{{metric: {metric}}}]
{"process_results: !function scored.score" if metric == "acc" else ""}
""")
    words = ["accuracy", "--model", str(folder), "--methods", "full", "int4:group=4", "--jobs", "0"]
    words += ["--include-path", str(tmp_path), "--tasks", "t_f1", "t_mcc", "t_brier_score", "t_acc"]
    words += ["--out", str(tmp_path / "out")]
    assert main(words) == 0
    cells = [*Store(tmp_path / "out").records()]
    assert len(cells) == 8 and all(cell["metrics"][0]["n"] == 6 for cell in cells)
    for cell in cells:
        known = cell["task"] == "t_acc"
        assert len(*cell["values"].values()) == 6 * known and cell["chance"] == (0.5 if known else None)
