"""Scoring through the cache: equal to lm-eval's own model under `full`, whatever the batch size."""

import copy
import json

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from eval.accuracy import KVLabLM
from eval.command import main
from eval.core.errors import Problem
from kvlab.faster import engine_of


@pytest.fixture(scope="module")
def reference(folder, loaded):
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    return HFLM(pretrained=plain, tokenizer=loaded[1], batch_size=4)


@pytest.mark.parametrize(
    "method, engine", [("full", "eager"), ("recompute", "eager"), ("static", "eager"), ("full", "compiled")]
)
def test_equals_lm_evals_own_model(asked, folder, reference, method, engine):
    ours = KVLabLM(str(folder), method, batch_size=4, engine=engine)
    assert engine_of(ours.model) == engine
    found = zip(ours.loglikelihood(asked.choices), reference.loglikelihood(asked.choices), strict=True)
    for mine, theirs in found:
        assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
        assert mine[1] == theirs[1]
    expected = reference.loglikelihood_rolling(asked.stories)
    assert ours.loglikelihood_rolling(asked.stories) == pytest.approx(expected, abs=1e-3)
    expected = [reference.generate_until([one])[0] for one in asked.prompts]
    assert ours.generate_until(asked.prompts) == expected


@pytest.mark.parametrize("method", ["full", "recompute", "infinigen", "h2o:budget=16", "int4:group=4"])
def test_batch_size_changes_nothing(asked, precise, method):
    found = []
    for size in (1, 64):
        lm = KVLabLM(precise[0], method, tokenizer=precise[1], batch_size=size)
        scores = lm.loglikelihood(asked.choices, disable_tqdm=True)
        rolling = lm.loglikelihood_rolling(asked.stories[:2], disable_tqdm=True)
        words = lm.generate_until(asked.prompts, disable_tqdm=True)
        found.append(([score for score, _ in scores] + rolling, [g for _, g in scores], words))
    for numbers, greedy, words in found[1:]:
        assert numbers == pytest.approx(found[0][0], abs=1e-4)
        assert greedy == found[0][1]
        assert words == found[0][2]


def test_a_method_is_felt_from_the_first_scored_token(asked, loaded):
    """tail = 1: even a one-token answer goes through the compressed cache."""
    wanted = asked.make("loglikelihood", [(asked.text(1, 90), " key")])
    full, sinks = (
        KVLabLM(loaded[0], method, tokenizer=loaded[1]).loglikelihood(wanted)[0][0]
        for method in ("full", "sinks:budget=8")
    )
    assert abs(full - sinks) > 1e-3


def test_bytes_are_metered_per_row(asked, loaded):
    lm = KVLabLM(loaded[0], "full", tokenizer=loaded[1], batch_size=64)
    context = asked.text(0, 30)
    lm.loglikelihood(asked.make("loglikelihood", [(context, " key"), (context, " boat")]))
    tokens = len(lm.tok_encode(context))
    held = lm.meter.means()
    assert held["row_steps"] >= 1
    per_token = 3 * 2 * 2 * 8 * 4  # layers, K and V, KV heads, head dimension, bytes
    assert held["device_bytes"] >= tokens * per_token
    recompute = KVLabLM(loaded[0], "recompute", tokenizer=loaded[1])
    recompute.loglikelihood(asked.make("loglikelihood", [(context, " key")]))
    assert recompute.meter.means()["device_bytes"] == 0


def test_sampling_and_too_long_generation_are_refused(asked, loaded):
    lm = KVLabLM(loaded[0], "full", tokenizer=loaded[1])
    cases = (({"do_sample": True, "temperature": 1}, "greedily"), ({"max_gen_toks": 600}, "600"))
    for options, words in cases:
        with pytest.raises(ValueError, match=words):
            lm.generate_until(asked.make("generate_until", [("boat", {"until": ["."]} | options)]))


def test_the_engine_is_part_of_what_a_cell_names(folder, tmp_path):
    """A cell of the other engine does not stand for one of this engine: one is made beside it."""
    words = ["accuracy", "--model", str(folder), "--out", str(tmp_path), "--jobs", "0", "--limit", "2"]
    words += ["--methods", "full", "h2o:budget=0.5", "--tasks", "recall"]
    found = {}
    for engine in ("eager", "compiled"):
        assert main([*words, "--engine", engine]) == 0
        cells = [json.loads(path.read_text()) for path in (tmp_path / "cells").glob("*.json")]
        cells = [cell for cell in cells if cell["config"].get("engine", "eager") == engine]
        above = ", eager above 8 rows" if engine == "compiled" else ""
        assert {cell["engine"] for cell in cells} == {engine + above}
        assert len(cells) == 2
        found[engine] = {cell["method"]: cell["metrics"][0]["value"] for cell in cells}
    assert found["compiled"] == pytest.approx(found["eager"], abs=1e-4)


REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% for one in messages %}{{ one.role }}: {{ one.content }}{% endfor %}"
)


def test_a_chat_template_that_refuses_a_system_turn_goes_without_it(loaded):
    """As with lm-eval's own model; whatever else it refuses is one line."""
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.chat_template = REFUSES
    ours, theirs = KVLabLM(model, tokenizer=tokenizer), HFLM(pretrained=model, tokenizer=tokenizer)
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    with pytest.warns(UserWarning, match="refuses a system turn"):
        assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns) == "user: Who?"
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(Problem, match=r"apply_chat_template: never$"):
        ours.apply_chat_template(turns[1:])


@pytest.mark.parametrize("bos", [True, False])
def test_a_prompt_that_begins_with_a_special_token_is_continued_as_by_hflm(loaded, bos):
    """HFLM adds the special tokens to a prompt that begins with the end token, where there is no other."""
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.bos_token = end if bos else None
    texts = [f"{end}The cat", f"{end}{end}A dog", "The dog", end]
    asked = [
        Instance("generate_until", {}, (text, {"until": ["\n\n"], "max_gen_toks": 8}), 0, ("t", 0, 1))
        for text in texts
    ]
    theirs = HFLM(pretrained=copy.deepcopy(model), tokenizer=copy.deepcopy(tokenizer), batch_size=1)
    ours = KVLabLM(model, tokenizer=tokenizer)
    assert ours.generate_until(asked, True) == theirs.generate_until(asked, True)


def test_a_continuation_with_a_token_that_the_model_lacks_is_one_line(loaded):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.add_tokens([f"<new {number}>" for number in range(model.config.vocab_size)])
    said = f" cat<new {model.config.vocab_size - 1}>"
    asked = Instance(
        request_type="loglikelihood", doc={}, arguments=("The", said), idx=0, metadata=("t", 0, 1)
    )
    with pytest.raises(ValueError, match=r"is none of the model's \d+ token ids$"):
        KVLabLM(model, tokenizer=tokenizer).loglikelihood([asked])
