"""A handful of rows of our own tasks on SmolLM2, in fp32, whenever the tests run: as lm-eval's own HF model.

test_smollm2_parity.py compares every kind of task, in minutes. lm-eval's model adds up its softmax in fp64
here, since torch's `log_softmax` in fp32 is off by 1e-5 nats for every token, on one side (a test below).
"""

from __future__ import annotations

import pytest
from lm_eval.models.huggingface import HFLM
from models.test_smollm2_parity import LONGEST, made_for, same_answers
from transformers import AutoModelForCausalLM

from eval.accuracy import KVLabLM
from eval.accuracy.protocols import FIRST
from kvlab.models import source_of


@pytest.fixture(scope="module")
def both(smollm2):
    """(ours, lm-eval's), in fp32, which is the default on a CPU."""
    model, tokenizer = smollm2
    plain = AutoModelForCausalLM.from_pretrained(source_of("smollm2"), dtype=model.dtype)
    how = {"batch_size": 1, "device": "cpu", "max_length": LONGEST, "softmax_dtype": "float64"}
    other = HFLM(pretrained=plain, tokenizer=tokenizer, **how)
    return KVLabLM(model, "full", tokenizer=tokenizer, batch_size=8, max_length=LONGEST), other


@pytest.mark.parametrize("name, most", [("recall", None), ("recall_em", 6)])
def test_one_document_is_answered_as_lm_eval_s_model_does(both, name, most):
    same_answers(both, made_for(name, [256], 2), 1, most=most)


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
