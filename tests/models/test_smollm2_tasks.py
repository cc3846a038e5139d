"""Scoring through `full` is lm-eval's own HF model on SmolLM2, task by task, as lm-eval makes the requests.

One task for each kind of request in fp32, whenever the tests run; all of them, in fp64 too, take minutes:
`pytest -m real tests/models`. KVLAB_EVAL_DATA names a folder with rows of public data sets; RULER needs its
packages (`pip install "kvlab[ruler]"`). In fp32 lm-eval's model adds up its softmax in fp64, since torch's
own in fp32 is off by 1e-5 nats for every token, on one side, so by 5e-4 for an answer of fifty.
"""

import importlib.util
import json

import pytest
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import kvlab
from eval.accuracy import KVLabLM, taskset
from eval.accuracy.protocols import FIRST
from kvlab.models import source_of

ALWAYS = ["recall", "prose", "recall_em"]
OURS = ["cloze", "needle", "chain", "needle_em", "chain_em", "needles_single"]
PUBLIC = {  # rows of its own
    "piqa": "piqa_validation.jsonl",
    "copa": "copa_validation.jsonl",
    "hellaswag": "hellaswag_validation.jsonl",
    "lambada_openai": "lambada_test.jsonl",
}
RULER = ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"]
LONGEST = 1280


@pytest.fixture(scope="module", params=["float32", pytest.param("float64", marks=pytest.mark.real)])
def both(request, smollm2):
    """(ours, lm-eval's)."""
    model, tokenizer = kvlab.load("smollm2", device="cpu", dtype=request.param)
    plain = AutoModelForCausalLM.from_pretrained(source_of("smollm2"), dtype=model.dtype)
    how = {"batch_size": 1, "device": "cpu", "max_length": LONGEST, "softmax_dtype": "float64"}
    other = HFLM(pretrained=plain, tokenizer=tokenizer, **how)
    return KVLabLM(model, "full", tokenizer=tokenizer, batch_size=8, max_length=LONGEST), other


def same_answers(both, task, limit: int, most: int | None = None, near: float = 1e-4) -> None:
    """The requests of a task's first documents, answered by both; most: tokens that are generated."""
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    kind = task.instances[0].request_type
    if most is not None:
        for request in task.instances:
            request.arguments[1]["max_gen_toks"] = most
    mine, theirs = (getattr(lm, kind)(list(task.instances)) for lm in both)
    assert len(mine) == len(theirs) >= limit
    if kind == "loglikelihood":
        for one, other in zip(mine, theirs, strict=True):
            assert one[0] == pytest.approx(other[0], abs=near) and one[1] == other[1]
    elif kind == "loglikelihood_rolling":
        assert mine == pytest.approx(theirs, abs=1e-3)
    else:
        assert kind == "generate_until" and mine == theirs


def made_for(name: str, lengths: list[int], documents: int):
    about = {"tokenizer": str(source_of("smollm2")), "lengths": lengths, "documents": documents}
    about["max_seq_lengths"] = lengths
    return taskset.prepared(name, 0, 1234, taskset.Sources(metadata=json.dumps(about)))


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.real) for name in OURS)])
def test_our_tasks(both, name):
    same_answers(both, made_for(name, [256], 2), 1, most=8 if name.endswith("_em") else None)


@pytest.mark.real
@pytest.mark.parametrize("name", PUBLIC)
def test_public_tasks(both, data, name):
    rows = taskset.Sources(data=((name, str(data / PUBLIC[name])),))
    same_answers(both, taskset.prepared(name, 0, 1234, rows), 2)


@pytest.mark.real
def test_wikitext(both, data, tmp_path):
    """A page that is longer than the context."""
    text = (data / "wikitext2_test.txt").read_text(encoding="utf-8")[:6000]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"page": text}) + "\n")
    rows = taskset.Sources(data=(("wikitext", str(tmp_path / "rows.jsonl")),))
    same_answers(both, taskset.prepared("wikitext", 0, 1234, rows), 1)


@pytest.mark.real
@pytest.mark.parametrize("name", RULER)
def test_ruler(both, name, monkeypatch):
    for package in ("nltk", "wonderwords", "scipy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'the package {package} is not installed (pip install "kvlab[ruler]")')
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)  # which is what it says without a network
    length = 2048 if name == "ruler_cwe" else 1024
    same_answers(both, made_for(name, [length], 1), 1, most=8)


def test_it_answers_and_what_it_answers_does_not_hang_on_the_protocol(both, smollm2):
    """Of eight names, by chance one in eight; the stored study has 85 of 96."""
    task = made_for("recall", [256], 2)
    task.build_all_requests(limit=4, rank=0, world_size=1)
    first = KVLabLM(smollm2[0], "full", tokenizer=smollm2[1], protocol=FIRST, max_length=LONGEST)
    found = [[score for score, _ in lm.loglikelihood(task.instances)] for lm in (both[0], first)]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    right = 0
    for document in {one.doc_id for one in task.instances}:
        own = [(found[0][i], one) for i, one in enumerate(task.instances) if one.doc_id == document]
        best = max(own, key=lambda scored: scored[0])[1]
        right += best.idx == best.doc["label"]
    assert right >= 3
