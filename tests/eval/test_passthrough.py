"""lm-eval's own command line, as far as kvlab prepares it: its words, its file, and what is bad in them."""

import json
import shutil
import sys

import pytest
from lm_eval._cli.harness import HarnessCLI

from eval.accuracy import KVLabLM, passthrough, taskset
from eval.command import main
from eval.core.errors import Problem

TASK = """task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{facts}} ASK"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
"""
NEEDLES = '{"lengths": [256], "documents": 2}'


@pytest.fixture
def here(tmp_path, monkeypatch, folder):
    """The working directory, with a task of one's own and its rows; files are written to it."""
    monkeypatch.chdir(tmp_path)
    row = {"facts": "The dog is Otis.", "choices": ["a", "b"], "label": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "mine.yaml").write_text(TASK)
    return tmp_path


WHERE = "dataset_kwargs: {data_files: {test: data/*.jsonl}}", "dataset_path: data", "dataset_name: null"


@pytest.mark.parametrize("where", WHERE)
def test_a_cell_names_the_documents_wherever_they_are(here, where):
    """By a pattern, in a folder, or in the file that the YAML names."""
    text = TASK.replace("dataset_path: json\n", "" if "path" in where else "dataset_path: json\n")
    if "null" not in where:
        text = text.replace("dataset_kwargs: {data_files: {test: rows.jsonl}}\n", "")
    (here / "mine.yaml").write_text(f"{text}{where}\n")
    (here / "data").mkdir()
    found = set()
    for label in (0, 1):
        row = {"facts": "The dog is Otis.", "choices": ["a", "b"], "label": label}
        for name in ("rows.jsonl", "data/test.jsonl"):
            (here / name).write_text(json.dumps(row))
        for known in (taskset._manager, taskset._looked_at, taskset.rows_digest):  # as in another process
            known.cache_clear()
        found.add(taskset.rows_digest("mine", 0, taskset.Sources(include=(str(here),))))
    assert len(found) == 2


def test_a_cell_names_what_the_functions_of_a_task_import_and_read(here, monkeypatch):
    """From the working directory, and from a text beside them."""
    monkeypatch.syspath_prepend(str(here))
    (here / "tasks").mkdir()
    (here / "tasks/mine.yaml").write_text(
        TASK.replace('"{{facts}} ASK"', "!function utils.asked").replace("rows.jsonl", f"{here}/rows.jsonl")
    )
    (here / "tasks/utils.py").write_text(
        "from pathlib import Path\nfrom helping import words\n\n\ndef asked(row):\n"
        "    return words(row) + Path(__file__).with_name('asks.txt').read_text()\n"
    )
    (here / "broken").mkdir()
    (here / "broken/__init__.py").write_text("raise RuntimeError('it must not run')\n")
    states, found = [("return row['facts']", "ASK"), ("return 'So: ' + row['facts']", "ASK")], []
    for body, asks in [*states, ("return row['facts']", "Ask"), states[0]]:
        (here / "helping.py").write_text(f"\ufeffdef words(row):\n    {body}\n    import broken.inner\n")
        (here / "tasks/asks.txt").write_text(asks)
        for known in (taskset._manager, taskset._looked_at, taskset.rows_digest):  # as in another process
            known.cache_clear()
        sys.modules.pop("helping", None)
        shutil.rmtree(here / "__pycache__", ignore_errors=True)
        found.append(taskset.rows_digest("mine", 0, taskset.Sources(include=(str(here / "tasks"),))))
    assert len(set(found)) == 3 and found[0] == found[3]


OWN = """
import random
from pathlib import Path
from lm_eval.api.task import ConfigurableTask


class Mine(ConfigurableTask):
    def __init__(self, config=None, **more):
        super().__init__(config={name: one for name, one in config.items() if name != "class"})

    def doc_to_text(self, row, doc_to_text=None):
        if row["label"]:
            raise RuntimeError("this row alone")
        return Path(__file__).with_name("asks.txt").read_text() + str(random.random())
"""


def test_a_cell_names_what_the_class_of_a_task_makes(here):
    """Which may draw, and fail at a row that nobody asks for."""
    asked = TASK.replace("multiple_choice", "generate_until").replace("doc_to_choice: choices\n", "")
    asked = asked.replace("rows.jsonl", f"{here}/rows.jsonl").replace("acc}", "exact_match}")
    (here / "tasks").mkdir()
    (here / "tasks/mine.yaml").write_text(asked + "class: !function own.Mine\n")
    (here / "tasks/own.py").write_text(OWN)
    rows = [{"facts": "So.", "label": label} for label in (0, 1, 0)]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = []
    for text in ("one", "other", "one"):
        (here / "tasks/asks.txt").write_text(text)
        for known in (taskset._manager, taskset._looked_at, taskset.rows_digest):
            known.cache_clear()
        found.append(taskset.rows_digest("mine", 0, taskset.Sources(include=(str(here / "tasks"),))))
    assert found[0] == found[2] != found[1]


@pytest.fixture
def prepared(monkeypatch):
    """What a command line becomes before lm-eval executes it."""

    def prepare(*words: str) -> dict:
        seen = []
        monkeypatch.setattr(HarnessCLI, "execute", lambda self, arguments: seen.append(vars(arguments)))
        assert passthrough.run(list(words)) == 0
        return seen[0]

    return prepare


def line_of(capsys, *words: str) -> str:
    """The line of a command that is refused, below what lm-eval logs and above nothing."""
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "WARNING" not in line and "INFO" not in line]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "more", [[], ["--metadata", NEEDLES], ["--metadata", "lengths=[256]", "documents=2"]]
)
def test_needles_know_the_models_tokenizer(folder, more, prepared):
    words = ["run", "--model", "kvlab", "--model_args", f"pretrained={folder},method=full"]
    about = prepared(*words, "--tasks", "needles_single", *more)["metadata"]
    assert about.pop("tokenizer") == str(folder)
    assert about == ({"lengths": [256], "documents": 2} if more else {})


def test_a_model_by_its_bare_name_and_a_users_own_tokenizer(prepared, monkeypatch):
    monkeypatch.setattr(passthrough, "source_of", lambda name: f"folder of {name}")
    words = ["run", "--model", "kvlab", "--tasks", "recall"]
    assert prepared(*words)["metadata"] == {"tokenizer": "folder of None"}
    words += ["--model_args", "pretrained=smollm2"]
    assert prepared(*words)["metadata"] == {"tokenizer": "folder of smollm2"}
    assert prepared(*words, "--metadata", "tokenizer=theirs")["metadata"] == {"tokenizer": "theirs"}
    assert prepared(*words[:-1], "tokenizer=theirs")["metadata"] == {"tokenizer": "theirs"}
    words = ["run", "--model", "hf", "--model_args", "pretrained=one/model", "--tasks", "needles_single"]
    assert prepared(*words)["metadata"] == {"tokenizer": "one/model"}
    with pytest.raises(Problem, match="tokenizer=FOLDER"):
        prepared("run", "--model", "dummy", "--tasks", "needles_single")


def test_a_configuration_file_is_prepared_as_words_are(here, folder, prepared, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (here / "more").mkdir()
    (here / "more" / "x.yaml").write_text(f"{TASK}metadata: {{context_until: ' ASK'}}\n")
    about = {"model": "kvlab", "tasks": ["recall", "mine"], "include_path": "more"}
    about |= {"model_args": {"pretrained": str(folder)}, "metadata": {"lengths": [256]}}
    (here / "run.yaml").write_text(json.dumps(about))  # JSON is YAML
    found = prepared("run", "--config", "run.yaml")
    assert found["include_path"] == [str(taskset.FOLDER), "more"]
    assert (found["batch_size"], found["device"]) == ("auto", "cpu")
    assert found["metadata"] == {"tokenizer": str(folder), "lengths": [256]}
    assert KVLabLM.untils_of_tasks == {"mine": " ASK"}
    (here / "run.yaml").write_text(json.dumps(about | {"batch_size": 4, "device": "cpu"}))
    found = prepared("run", "--config", "run.yaml", "--batch_size", "3")
    assert found["batch_size"] == "3" and found["device"] is None  # the file says it


def test_our_tasks_and_a_users_in_a_configuration_file(here, folder, capsys):
    """Where the steps run compiled."""
    given = {"pretrained": str(folder), "method": "int8", "engine": "compiled"}
    about = {"model": "kvlab", "tasks": ["recall", "mine"], "include_path": ".", "limit": 2}
    (here / "run.yaml").write_text(
        json.dumps(about | {"model_args": given, "device": "cpu", "batch_size": 4})
    )
    assert main(["lm-eval", "run", "--config", "run.yaml"]) == 0
    said = capsys.readouterr().out
    assert "|recall|" in said and "|mine" in said


GENERATION = [
    ("num_beams=4,repetition_penalty=1.3", "num_beams=4: kvlab decodes greedily; expected num_beams=1"),
    ("max_new_toks=3", "max_new_toks: kvlab does not apply it, did you mean"),
    ("max_gen_toks=0", "max_gen_toks=0: expected tokens, at least 1"),
    ("max_gen_toks=3,max_tokens=4", "max_gen_toks, max_tokens: they all mean max_gen_toks"),
]


@pytest.mark.parametrize("rows", ["0", "few"])
def test_a_batch_size_that_is_none_is_one_line(here, capsys, rows):
    words = ["lm-eval", "run", "--model", "kvlab", "--tasks", "recall", "--batch_size", rows]
    assert f"batch_size='{rows}': '{rows}' is not a whole number of at least " in line_of(capsys, *words)


@pytest.mark.parametrize(("options", "said"), GENERATION)
def test_options_of_generation_that_are_not_applied(here, capsys, options, said):
    """On either command, and in the file of --config; another model's are its own."""
    words = ["accuracy", "--jobs", "0", "--tasks", "recall_em", "--gen-kwargs", options]
    assert f"--gen-kwargs {said}" in line_of(capsys, *words)
    words = ["lm-eval", "run", "--model", "kvlab", "--tasks", "recall_em"]
    assert f"--gen_kwargs {said}" in line_of(capsys, *words, "--gen_kwargs", options)
    (here / "run.yaml").write_text(
        json.dumps({"model": "kvlab", "tasks": ["recall_em"], "gen_kwargs": options})
    )
    assert f"--gen_kwargs {said}" in line_of(capsys, "lm-eval", "run", "--config", "run.yaml")


def test_options_of_generation_that_are(prepared):
    """By lm-eval's other names, too, which a task's own YAML would else go before."""
    greedy = "max_new_tokens=3,temperature=0.0,do_sample=False,num_beams=1"
    words = ["run", "--model", "kvlab", "--tasks", "recall_em", "--gen_kwargs", greedy]
    expected = {"max_gen_toks": 3, "temperature": 0.0, "do_sample": False, "num_beams": 1}
    assert prepared(*words)["gen_kwargs"] == expected
    task = taskset.prepared("recall_em", None, 1234, writing=greedy)
    assert expected.items() <= task.get_config("generation_kwargs").items()
    words[2] = "hf"
    words[-1] = "num_beams=4"
    assert prepared(*words)["gen_kwargs"] == {"num_beams": 4}


@pytest.mark.parametrize(("task", "said"), [
    ("mine.yaml", "task mine: where its context ends is not known"),
    ("winogender_all", "task winogender_all: where its context ends is not known"),
    ("cloze", "task cloze: there is no context to compress"),
])  # fmt: skip
def test_a_task_without_a_cut_is_refused_before_a_model_is_loaded(here, capsys, monkeypatch, task, said):
    monkeypatch.setattr(KVLabLM, "__init__", lambda self, *_, **__: pytest.fail("a model was made"))
    words = ["lm-eval", "run", "--model", "kvlab", "--tasks", task, "--model_args"]
    assert said in line_of(capsys, *words, "method=full,protocol=context-first")


def test_a_task_with_a_cut_of_its_users_is_not(here, folder, prepared):
    words = ["run", "--model", "kvlab", "--tasks", "mine.yaml", "--model_args"]
    about = f"pretrained={folder},protocol=context-first,context_until= ASK"
    assert prepared(*words, about)["include_path"]
    (here / "mine.yaml").write_text(TASK + 'metadata: {context_until: " ASK"}\n')
    assert prepared(*words, f"pretrained={folder},protocol=context-first")["include_path"]


def test_the_protocol_is_named_by_whoever_does_not(folder, prepared):
    words = ["run", "--model", "kvlab", "--tasks", "recall", "--model_args"]
    assert prepared(*words, f"pretrained={folder}")["model_args"]["protocol"] == "question-inside"
    about = prepared(*words, f"pretrained={folder},protocol=context-first")["model_args"]
    assert about == {"pretrained": str(folder), "protocol": "context-first"}


BAD = {
    "broken.yaml": ('task: [unclosed\n"', "--tasks broken.yaml: this YAML does not parse: line 2"),
    "beside.yaml": (f"{TASK}context_until: ASK\n", "has no key 'context_until'; it belongs under metadata:"),
    "strange.yaml": (f"{TASK}doc_to_txt: x\n", "has no key 'doc_to_txt', did you mean doc_to_text"),
    "empty.yaml": ("# nothing\n", "--tasks empty.yaml: this YAML is empty"),
    "nameless.yaml": ("output_type: multiple_choice\n", "it names no task"),
    "function.yaml": ("task: mine\nprocess_docs: !function nowhere.at_all\n", "nowhere"),
    "number.yaml": (
        f"{TASK}metadata: {{context_until: 5}}\n",
        "context_until of task mine: expected the text before which a prompt is cut, got 5",
    ),
    "near.yaml": (f"{TASK}metadata: {{context_untill: ' ASK'}}\n", "did you mean context_until?"),
}


@pytest.mark.parametrize(
    "name, command",
    [(name, ("lm-eval run --model kvlab", "accuracy --jobs 0")[i % 2]) for i, name in enumerate(BAD)],
)
def test_a_bad_file_as_a_task_is_one_line(here, capsys, name, command):
    text, said = BAD[name]
    (here / name).write_text(text)
    assert said in line_of(capsys, *command.split(), "--tasks", name)


def test_what_is_bad_and_not_wanted_stops_nothing(here, prepared):
    (here / "mine.yaml").write_text(f"{TASK}metadata: {{context_untill: x}}\n")
    (here / "broken.yaml").write_text('task: bad\nx: [unclosed\n"')
    prepared("run", "--model", "kvlab", "--tasks", "recall", "--include_path", ".")
    assert taskset.check(["recall"], taskset.Sources((".",))) == ["recall"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[recall]", "--config run.yaml: expected lines"),
        ('{"tsks": ["recall"]}', "unknown 'tsks', did you mean tasks?"),
        ("tasks: [", "Invalid YAML"),
        (None, "not found"),
    ],
)
def test_a_bad_configuration_file_is_one_line(here, capsys, text, said):
    if text is not None:
        (here / "run.yaml").write_text(text)
    assert said in line_of(capsys, "lm-eval", "run", "--config", "run.yaml")


def test_a_named_file_is_read_and_none_beside_it(here, capsys):
    (here / "t").mkdir()
    (here / "t" / "mine.yaml").write_text("task: mine\noutput_type: generate_until\n")
    (here / "t2.yaml").write_text(TASK)
    name, file = taskset.from_file("t2.yaml")
    sources = taskset.Sources(named=((name, file),))
    assert taskset.check([name], sources) == ["mine"] and not capsys.readouterr().err
    assert taskset.load(name, sources)["mine"].OUTPUT_TYPE == "multiple_choice"
    assert here / "t2.yaml" in taskset.files(name, sources)


@pytest.mark.parametrize(("group", "said"), [
    ("task: [mine]\naggregate_metric_list: [{metric: acc}]\n", None),
    ("task: [{task: mine, task_alias: M}, {group: part, task: [mine], group_alias: P}]\n", None),
    ("task: [{task: mine, num_fewshot: 3}]\n", "num_fewshot"),
    ("task: [mine]\nnum_fewshot: 2\n", "num_fewshot"),
    ("task: [{group: part, task: [{task: mine, doc_to_text: x}]}]\n", "doc_to_text"),
    ("task: [{task: mine, metadata: {version: 2}}]\n", "metadata"),
    ("task: [{group: part, metadata: {version: 2}, task: [mine]}]\n", None),
    ("task: [inner]\n", "target_delimiter"), ("task: [{group: inner, output_type: y}]\n", "output_type"),
])  # fmt: skip
def test_what_a_group_sets_of_its_tasks_is_not_dropped(here, group, said):
    (here / "mine.yaml").write_text(TASK)
    (here / "inner.yaml").write_text("group: inner\ntask: [mine]\ntarget_delimiter: ''\n")
    (here / "outer.yaml").write_text(f"group: outer\n{group}")
    for known in (taskset._manager, taskset._looked_at):
        known.cache_clear()
    if said is None:
        assert taskset.check(["outer"], taskset.Sources((str(here),))) == ["mine"]
        return
    with pytest.raises(Problem, match=f"--tasks outer: this group sets {said} of its tasks"):
        taskset.check(["outer"], taskset.Sources((str(here),)))


@pytest.mark.parametrize(("package", "extra", "task", "command"), [
    ("wonderwords", "ruler", "niah_single_1", "lm-eval run --model kvlab"),
    ("jieba", "longbench", "longbench_qasper", "accuracy --jobs 0"),
])  # fmt: skip
def test_a_missing_package_names_our_extra(here, capsys, monkeypatch, package, extra, task, command):
    for name in [name for name in sys.modules if name.startswith(f"lm_eval.tasks.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = line_of(capsys, *command.split(), "--tasks", task)
    assert f'the package {package} is not installed: pip install "kvlab[{extra}]"' in line
    assert "lm_eval[" not in line


@pytest.mark.parametrize("said", ['["a"]', "[]", "[512, -1]", "[512.5]"])
@pytest.mark.parametrize("command", ["lm-eval run --model kvlab", "accuracy --jobs 0"])
def test_what_is_no_length_of_rulers_is_one_line(here, capsys, command, said):
    words = [*command.split(), "--tasks", "recall,niah_single_1", "--metadata"]
    line = line_of(capsys, *words, f'{{"max_seq_lengths": {said}}}')
    assert "--metadata max_seq_lengths=" in line and "expected whole numbers of tokens above 0" in line
