"""Text is written as lm-eval's own HF model writes it, whatever the model's generation_config and its
tokenizer say: end tokens, processors of the logits, limits."""

import copy
import random

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import kvlab
from eval.accuracy import KVLabLM
from eval.core.errors import Problem
from kvlab.models.loading import EMBEDDED

PROMPTS = (
    "The brown dog Otis slept by the river. The red cat Mia ran to the barn.\nQuestion: the brown dog",
    "The red cat",
    "Mia ran to the barn. Mia ran to the barn. Mia ran to the barn. Mia ran",
)
LIMIT = 12


def asked(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=("t", i, 1))
        for i, one in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED["workshop"], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return kvlab.load()[1]


def drawn(seed: int, common: list[int]) -> dict:
    """Some settings of a generation_config; common: tokens that the model likes to write."""
    dice = random.Random(seed)
    some = lambda count: dice.sample(common, count)
    settings = {
        "eos_token_id": [0, *some(dice.randint(1, 3))],
        "repetition_penalty": dice.choice([1.05, 1.3, 2.0, 0.8]),
        "suppress_tokens": some(4),
        "begin_suppress_tokens": some(3),
        "min_new_tokens": dice.randint(1, 12),
        "min_length": dice.randint(5, 40),
        "no_repeat_ngram_size": dice.randint(1, 3),
        "bad_words_ids": [some(1), some(2)],
        "sequence_bias": {(some(1)[0],): 3.5, tuple(some(2)): -7.0},
        "forced_eos_token_id": 0,
        "forced_bos_token_id": some(1)[0],
        "exponential_decay_length_penalty": (3, 1.3),
        "encoder_repetition_penalty": dice.choice([1.4, 0.7]),
        "encoder_no_repeat_ngram_size": 2,
        "max_new_tokens": dice.randint(3, 28),
        "renormalize_logits": True,
        "remove_invalid_values": True,
    }
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20}  # as Qwen 2.5 says
    return {name: settings[name] for name in dice.sample(list(settings), dice.randint(1, 4))} | (
        sampling if seed % 2 else {}
    )


def both(plain, tokenizer, settings: dict, methods=("full", "recompute")) -> tuple[list, dict]:
    """(lm-eval's texts, ours by method), the model having these settings."""
    plain = copy.deepcopy(plain)
    for name, value in settings.items():
        setattr(plain.generation_config, name, value)
    options = {"until": ["zzz"], "max_gen_toks": LIMIT}
    requests = lambda: asked("generate_until", [(prompt, dict(options)) for prompt in PROMPTS])
    theirs = HFLM(pretrained=plain, tokenizer=copy.deepcopy(tokenizer), batch_size=1)
    expected = theirs.generate_until(requests(), disable_tqdm=True)
    ours = KVLabLM(copy.deepcopy(plain), tokenizer=tokenizer, batch_size=8)
    ours.together(methods)
    found = {}
    for method in methods:
        ours.use(method)
        found[method] = ours.generate_until(requests(), disable_tqdm=True)
    return expected, found


@pytest.fixture(scope="module")
def common(plain, tokenizer) -> list[int]:
    """Tokens of what the model writes when nothing is said."""
    texts, _ = both(plain, tokenizer, {})
    return sorted({token for text in [*PROMPTS, *texts] for token in tokenizer.encode(text)} - {0, 1})


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("seed", range(16))
def test_drawn_configurations(plain, tokenizer, common, seed):
    settings = drawn(seed, common)
    expected, found = both(plain, tokenizer, settings)
    assert found == {"full": expected, "recompute": expected}, settings


@pytest.mark.parametrize("missing", ["bos_token", "pad_token"])
def test_tokenizers_that_lack_a_token(plain, tokenizer, missing):
    tokenizer = copy.deepcopy(tokenizer)
    setattr(tokenizer, missing, None)
    expected, found = both(plain, tokenizer, {"repetition_penalty": 1.4}, ("full",))
    assert found["full"] == expected


def test_a_model_without_an_end_token_writes_to_the_limit(plain, tokenizer):
    expected, found = both(plain, tokenizer, {"eos_token_id": None, "suppress_tokens": [0]})
    assert found == {"full": expected, "recompute": expected}


def test_a_tokenizer_without_end_or_beginning_is_refused_where_they_are_needed(plain, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    ours = KVLabLM(copy.deepcopy(plain), tokenizer=bare)
    whole = KVLabLM(copy.deepcopy(plain), tokenizer=tokenizer)
    pairs = asked("loglikelihood", [("The red", " cat"), ("The red", " dog")])
    assert ours.loglikelihood(pairs) == whole.loglikelihood(pairs)
    with pytest.raises(Problem, match="eos_token=None"):
        ours.generate_until(asked("generate_until", [("The", {"until": ["."]})]))
    for kind, arguments in (("loglikelihood", ("", " cat")), ("loglikelihood_rolling", ("The red cat",))):
        with pytest.raises(Problem, match="bos_token=None, eos_token=None"):
            getattr(ours, kind)(asked(kind, [arguments]))


@pytest.mark.parametrize("name, value", [
    ("num_beams", 3), ("guidance_scale", 1.5), ("max_time", 3.0), ("stop_strings", ["a"]),
    ("token_healing", True), ("num_return_sequences", 2), ("prompt_lookup_num_tokens", 3),
    ("watermarking_config", {"greenlist_ratio": 0.5}), ("penalty_alpha", 0.5), ("dola_layers", "low"),
])  # fmt: skip
def test_what_is_more_than_processors_is_refused_in_one_line(plain, tokenizer, name, value):
    model = copy.deepcopy(plain)
    setattr(model.generation_config, name, value)
    ours = KVLabLM(model, tokenizer=tokenizer)
    with pytest.raises(Problem, match=r"^[^\n]*generation_config cannot be followed[^\n]*$"):
        ours.generate_until(asked("generate_until", [("The", {"until": ["."]})]))


def test_a_model_in_train_mode_is_scored_in_eval_mode_and_given_back(plain, tokenizer):
    kept, model = copy.deepcopy(plain), copy.deepcopy(plain)
    for one in (kept, model):
        for layer in one.model.layers:
            layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.5))
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    texts = asked("generate_until", [(PROMPTS[1], {"until": ["zzz"], "max_gen_toks": 6})])
    pairs, rolling = asked("loglikelihood", [("The red", " cat")]), asked("loglikelihood_rolling", [("A b",)])
    answers = []
    for one in (kept.eval(), model):
        lm = KVLabLM(one, "h2o:budget=0.5", tokenizer=tokenizer)
        answers.append((lm.loglikelihood(pairs), lm.generate_until(texts), lm.loglikelihood_rolling(rolling)))
    assert answers[0] == answers[1]
    assert [module.training for module in model.modules()] == before


def test_a_token_that_spans_context_and_continuation_costs_its_request(plain, tokenizer, capsys):
    ours = KVLabLM(copy.deepcopy(plain), tokenizer=tokenizer)
    good = [("The red", " cat"), ("The red", " dog")]
    alone = ours.loglikelihood(asked("loglikelihood", good))
    spanned = ("The re", "d")
    assert len(tokenizer.encode("The red")) == len(tokenizer.encode("The re"))
    capsys.readouterr()
    found = ours.loglikelihood(asked("loglikelihood", [good[0], spanned, good[1]]), disable_tqdm=True)
    assert [score for score, _ in found[::2]] == pytest.approx([score for score, _ in alone], abs=1e-4)
    assert found[1] == (-torch.inf, False)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'d' after 'The re'" in said
    assert ours.prefills()["spanned"] == 1
    assert ours.loglikelihood(asked("loglikelihood", [spanned])) == [(-torch.inf, False)]


def test_who_asks_again_or_otherwise_is_answered_anew():
    """Nothing is remembered of another request, nor of a model that has changed since."""
    model, tokenizer = kvlab.load()
    model = copy.deepcopy(model)
    model.generation_config.repetition_penalty = 1.8
    options = {"until": ["zzz"], "max_gen_toks": 20}
    texts = [(PROMPTS[0], options), (PROMPTS[0], options | {"repetition_penalty": 1.0})]
    ours = KVLabLM(model, tokenizer=tokenizer)
    both = ours.generate_until(asked("generate_until", texts))
    anew = lambda one: KVLabLM(model, tokenizer=tokenizer).generate_until(asked("generate_until", [one]))
    assert both == [anew(one)[0] for one in texts] and both[0] != both[1]
    choice = asked("loglikelihood", [("The red", " cat")])
    before = ours.loglikelihood(choice)
    model.model.layers[2].mlp.down_proj.weight.data.mul_(0)
    assert ours.loglikelihood(choice) == KVLabLM(model, tokenizer=tokenizer).loglikelihood(choice) != before


def test_a_task_may_say_otherwise_than_the_model(plain, tokenizer):
    said = {"until": ["zzz"], "max_gen_toks": LIMIT, "repetition_penalty": 1.0, "num_beams": 1}
    requests = asked("generate_until", [(PROMPTS[0], said)])
    model = copy.deepcopy(plain)
    expected = KVLabLM(model, tokenizer=tokenizer).generate_until(requests)
    model.generation_config.repetition_penalty, model.generation_config.num_beams = 1.8, 4
    assert KVLabLM(model, tokenizer=tokenizer).generate_until(requests) == expected
