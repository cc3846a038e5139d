"""What is compressed and what is asked: equal under `full`, and counted."""

import copy
import random

import pytest
import torch
from families.models import family
from tiny import left_padded, prompt

import kvlab
from eval.accuracy import KVLabLM, continuing
from eval.accuracy.protocols import EVERY_STEP, FIRST, INSIDE, MANY, ONCE, PROTOCOLS, REUSE
from eval.accuracy.reuse import Sets, reusing
from eval.accuracy.scoring import Scorer
from eval.core.errors import Problem
from kvlab.decode import Stepper
from kvlab.spec import parse

CONTEXTS = [
    "Otis owns the brown dog. Mira owns the red hen. Tom ran home under the old bridge with a loaf.",
    "Once there was a small boat on a wide lake. Mira found a red key. The baker gave Tom a warm loaf.",
]
QUESTIONS = ["the brown dog", "the red hen and the key", "who ran home"]


def prompts() -> list[str]:
    return [f"{context}\nQuestion: {question}" for context in CONTEXTS for question in QUESTIONS]


def choices(asked, texts=None):
    pairs = [(text, f" {choice}") for text in texts or prompts() for choice in ("Otis", "the wide lake")]
    return asked.make("loglikelihood", pairs, task="recall")


def writing(asked, texts=None):
    options = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    return asked.make("generate_until", [(text, options) for text in texts or prompts()], task="recall_em")


def scored(loaded, asked, method, protocol, texts=None, **how):
    lm = KVLabLM(loaded[0], method, tokenizer=loaded[1], protocol=protocol, **how)
    scores = [score for score, _ in lm.loglikelihood(choices(asked, texts), disable_tqdm=True)]
    return scores, lm.generate_until(writing(asked, texts), disable_tqdm=True)


@pytest.mark.parametrize("method", ["full", "recompute"])
def test_under_full_every_protocol_says_the_same(loaded, asked, method):
    expected = scored(loaded, asked, "full", INSIDE)
    for protocol in PROTOCOLS:
        for size in (1, 64):
            found = scored(loaded, asked, method, protocol, batch_size=size)
            assert found[0] == pytest.approx(expected[0], abs=1e-4), protocol
            assert found[1] == expected[1], protocol


def test_torchs_default_device_changes_nothing(loaded, asked):
    for protocol in PROTOCOLS:
        expected = scored(loaded, asked, "h2o:budget=0.5", protocol)
        with torch.device("meta"):
            assert scored(loaded, asked, "h2o:budget=0.5", protocol) == expected


def test_texts_of_several_options_are_each_cut_where_their_own_context_ends(loaded, asked):
    options = [{"until": ["."], "max_gen_toks": count, "do_sample": False} for count in (8, 7)]
    mixed = [(text, options[place % 2]) for place, text in enumerate(prompts())]

    def written(pairs: list) -> list[str]:
        lm = KVLabLM(loaded[0], "sinks:budget=0.3", tokenizer=loaded[1], protocol=FIRST)
        return lm.generate_until(asked.make("generate_until", pairs, task="recall_em"), disable_tqdm=True)

    assert written(mixed) == [written([pair])[0] for pair in mixed]


def test_tasks_that_cut_the_same_prompt_elsewhere_are_answered_each_by_its_own(loaded, asked):
    """As when each is asked alone."""
    (text, *_), method = prompts(), "snapkv:budget=0.3,window=1"
    cut = {"early": " dog", "late": "\nQuestion"}

    def answers(*tasks):
        lm = KVLabLM(loaded[0], method, tokenizer=loaded[1], protocol=FIRST)
        lm.untils = cut
        ask = lambda kind, what: [
            one for task in tasks for one in asked.make(kind, [(text, what)], task=task)
        ]
        told = {"until": ["."], "max_gen_toks": 4, "do_sample": False}
        scores = lm.loglikelihood(ask("loglikelihood", " Otis"), disable_tqdm=True)
        return [s for s, _ in scores], lm.generate_until(ask("generate_until", told), disable_tqdm=True)

    both, early, late = answers("early", "late"), answers("early"), answers("late")
    assert early[0] != pytest.approx(late[0], abs=1e-3)
    assert both[0] == pytest.approx(early[0] + late[0], abs=1e-4) and both[1] == early[1] + late[1]


def test_prompts_that_lose_their_beginning_are_counted_and_never_all_of_their_context(loaded, asked, capsys):
    short, long = CONTEXTS[0], f"{' '.join(CONTEXTS)} {CONTEXTS[0]}"
    texts = [f"{short}\nQuestion: who?", f"{long}\nQuestion: who?"]
    longest = len(loaded[1](long).input_ids)
    lm = KVLabLM(loaded[0], "full", tokenizer=loaded[1], protocol=FIRST, max_length=longest)
    lm.loglikelihood(choices(asked, texts), disable_tqdm=True)
    assert lm.prefills()["shortened"] == 1
    assert f"prompts longer than {longest} tokens, which lose their beginning: 1" in capsys.readouterr().err
    question = len(loaded[1]("\nQuestion: who?").input_ids)
    lm = KVLabLM(loaded[0], "full", tokenizer=loaded[1], protocol=FIRST, max_length=question)
    with pytest.raises(Problem, match=r"loses its first .* with them its whole context"):
        lm.loglikelihood(choices(asked, texts), disable_tqdm=True)
    with pytest.raises(Problem, match="its whole context"):
        lm.max_length += 8  # room for the answer
        lm.generate_until(writing(asked, texts), disable_tqdm=True)


def prefilled(lm) -> int:
    return sum(scorer.prefilled for scorer, *_ in lm._known.values())


@pytest.mark.parametrize(
    "method",
    ["h2o:budget=0.4", "snapkv:budget=12,window=4", "int4", "topk:budget=0.3", "kvzip:budget=0.4", "adakv"],
)
def test_many_questions_score_as_context_first(loaded, asked, method):
    how = {"batch_size": 64}
    first, many = (scored(loaded, asked, method, protocol, **how) for protocol in (FIRST, MANY))
    assert many[0] == pytest.approx(first[0], abs=2e-2 if method == "int4" else 1e-4)
    assert many[1] == first[1]


@pytest.mark.parametrize("method", ["full", "h2o:budget=0.4", "topk:budget=0.3"])
def test_questions_of_any_length_share_a_batch(loaded, asked, method):
    """One token, several, and none before the last one: a row in a batch is the row alone."""
    texts = [f"{CONTEXTS[0]}?", f"{CONTEXTS[1]} Where is the key ?", f"{CONTEXTS[1]} lake?", "Tom?"]
    found = []
    for size in (1, 64):
        lm = KVLabLM(loaded[0], method, tokenizer=loaded[1], protocol=FIRST, batch_size=size)
        begins = lambda text: len(CONTEXTS[0]) if text.startswith(CONTEXTS[0]) else len(CONTEXTS[1])
        lm._cut = lambda requests: [begins(request.args[0]) for request in requests]  # noqa: B023
        found.append([score for score, _ in lm.loglikelihood(choices(asked, texts), disable_tqdm=True)])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_reuse_holds_what_another_question_chose(loaded, asked):
    """The set of the context that SnapKV holds with question 1 inside, asked question 2."""
    method = "snapkv:budget=12,window=4"
    texts = [f"{CONTEXTS[0]}\nQuestion: {question}" for question in QUESTIONS[:2]]
    lm = KVLabLM(loaded[0], method, tokenizer=loaded[1], protocol=REUSE)
    found = [score for score, _ in lm.loglikelihood(choices(asked, texts), disable_tqdm=True)]
    tokenizer, model = loaded[1], loaded[0]
    context = tokenizer(CONTEXTS[0]).input_ids
    expected = []
    for mine, other in ((texts[0], texts[1]), (texts[1], texts[0])):
        full = Stepper(model, kvlab.make_cache(model, method))
        full.feed(torch.tensor([tokenizer(other).input_ids]))
        sets = Sets()
        sets.read(full.cache, torch.tensor([len(context)]))
        prompt = tokenizer(mine).input_ids
        for choice in (" Otis", " the wide lake"):
            stepper = Stepper(model, kvlab.make_cache(model, "full"))
            stepper.feed(torch.tensor([context]))
            for layer in stepper.cache.attending:  # what was not held is let go by hand
                stay = sets.stay[layer.index]
                layer.let_go(stay, (stay >= 0).sum(-1).amax(-1).tolist())
                layer.table.newest = False  # among them the newest token, maybe
            answer = tokenizer(mine + choice).input_ids[len(prompt) :]
            logits = stepper.feed(torch.tensor([prompt[len(context) :]]), last=True)
            total = 0.0
            for token in answer:
                total += logits.log_softmax(-1)[0, token].item()
                logits = stepper.feed(torch.tensor([[token]]), last=True)
            expected.append(total)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("together", [False, True])
def test_reuse_asks_at_true_positions_whichever_tokens_stay(loaded, together):
    """Against the plain model, whose mask hides from the question what did not stay, head by head. The newest
    token of the context stays in no head, and of the first head only the beginning."""
    model = loaded[0]
    cache, sets = reusing(model, parse("snapkv:budget=3"))
    kv_heads, context, ids = cache.attending[0].kv_heads, 20, torch.arange(50, 76)[None]
    stay = torch.tensor([[[0, 1, 2]] + [[1, 15, 18]] * (kv_heads - 1)])
    sets.stay = {layer.index: stay for layer in cache.attending}
    stepper = Stepper(model, cache)
    stepper.feed(ids[:, :context])
    cache.hold()
    parts = [ids[:, context:]] if together else ids[:, context:].split(1, dim=1)
    found = torch.cat([stepper.feed(part) for part in parts], 1)
    tokens = ids.shape[1]
    sees = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(kv_heads, -1, -1).clone()
    sees[:, context:, :context] = False
    sees[:, context:, :context].scatter_(2, stay[0][:, None].expand(-1, tokens - context, -1), True)
    sees = sees.repeat_interleave(model.config.num_attention_heads // kv_heads, dim=0)[None]
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    plain = type(model)(config).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = plain(ids, attention_mask=torch.where(sees, 0.0, -torch.inf)).logits[:, context:]
    assert torch.allclose(found, expected, atol=1e-4)
    for layer in cache.attending:
        assert (layer.positions[..., -(tokens - context) :] == torch.arange(context, tokens)).all()


@pytest.mark.parametrize("spec", ["h2o:budget=0.5", "snapkv:budget=0.5,window=2", "adakv:budget=0.4"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "Qwen2", "Llama 4"])
def test_reuse_holds_what_the_other_question_left_of_a_window(name, spec):
    """Contexts around the window's length; of the first tokens, layers hold none any more."""
    seed = random.randrange(10**6)
    draw, model = random.Random(seed), kvlab.prepare(family(name))
    for tokens in draw.sample(range(5, 24), 4):
        (cache, sets), other = reusing(model, parse(spec)), kvlab.make_cache(model, spec)
        ids, mask = left_padded([prompt(tokens, seed=seed), prompt(draw.randint(2, tokens), seed=seed + 1)])
        question = prompt(3, 2, seed=seed + 2)
        asked = torch.cat([mask, torch.ones_like(question)], 1)
        Stepper(model, other).feed(torch.cat([ids, question], 1), asked)
        sets.read(other, mask.sum(1))
        Stepper(model, cache).feed(ids, mask)
        for layer, left in zip(cache.attending, other.attending, strict=True):
            for row, length in enumerate(mask.sum(1).tolist()):
                held = [[p for p in head if p >= 0] for head in layer.positions[row].tolist()]
                due = [sorted(p for p in head if 0 <= p < length) for head in left.positions[row].tolist()]
                assert held == due, f"seed {seed}, {tokens} tokens, layer {layer.index}, row {row}"


def test_reuse_holds_heads_of_different_lengths_as_they_are(loaded):
    cache, sets = reusing(loaded[0], parse("kvzip:budget=0.4"))
    others = cache.attending[0].kv_heads - 1
    stay = torch.tensor([[[0, 3, 8]] + [[8, -1, -1]] * others])
    sets.stay = {layer.index: stay for layer in cache.attending}
    Stepper(loaded[0], cache).feed(torch.arange(9)[None])
    for layer in cache.attending:
        assert layer.store.left.counts.tolist() == [[3] + [1] * others]
        assert len(layer.store.left.keys[0]) == 3 + others


@pytest.mark.parametrize("evict, held", [(ONCE, 12 + 1 + 4), (EVERY_STEP, 12)])
def test_with_the_question_inside_an_answer_is_held_on_top_too(loaded, monkeypatch, evict, held):
    """Of the prompt the budget; on top its last token and, of an answer of five, the four that are fed."""
    found, answered, method = [], continuing._continue, "h2o:budget=12"

    def noted(scorer, name, stepper, *given):
        answers = answered(scorer, name, stepper, *given)
        found.append([layer.rows_held for layer in stepper.cache.layers])
        return answers

    monkeypatch.setattr(continuing, "_continue", noted)
    caches = {method: kvlab.make_cache(loaded[0], method)}
    scorer = Scorer(loaded[0], caches, 8, 512, protocol=INSIDE, evict=evict)
    prompts = [list(range(start, start + 30)) for start in (30, 90)]
    continuing.continuations(scorer, [(prompt, [[7, 8, 9, 10, 11]]) for prompt in prompts])
    assert found == [[[held] * 2] * 3]


@pytest.mark.parametrize("protocol", [MANY, REUSE])
def test_contexts_that_nobody_shares_are_refused(loaded, asked, protocol):
    texts = [f"{context}\nQuestion: {QUESTIONS[0]}" for context in CONTEXTS]
    with pytest.raises(ValueError, match=r"share their context|one question only"):
        scored(loaded, asked, "h2o", protocol, texts)


def test_reuse_is_the_methods_own_or_refused(loaded, asked):
    """What a keep does besides to choose tokens is not left out in silence."""
    how = {"tokenizer": loaded[1], "protocol": REUSE}
    for method, named in (("d2o", "merge"), ("keydiff:merge=true", "merge"), ("h2o:every=8", "every")):
        with pytest.raises(Problem, match=f"method {method}.*: {named} under protocol reuse"):
            KVLabLM(loaded[0], method, **how)
    with pytest.raises(ValueError, match="evict='every-step': under protocol reuse"):
        KVLabLM(loaded[0], "h2o", **how, evict=EVERY_STEP)
    scores = {method: scored(loaded, asked, method, REUSE)[0] for method in ("sinks", "sinks:renumber=true")}
    assert scores["sinks"] != pytest.approx(scores["sinks:renumber=true"], abs=1e-3)


def test_bad_protocols_and_cuts(loaded, asked):
    how = {"tokenizer": loaded[1]}
    for wrong in ({"protocol": "question-outside"}, {"evict": "never"}):
        with pytest.raises(ValueError, match="expected one of"):
            KVLabLM(loaded[0], "full", **how, **wrong)
    lm = KVLabLM(loaded[0], "full", **how, protocol=FIRST, context_until="\nWHO")
    with pytest.raises(Problem, match=r"cut is before '\\nWHO', which is not found"):
        lm.loglikelihood(choices(asked), disable_tqdm=True)
    lm = KVLabLM(loaded[0], "full", **how, protocol=FIRST)
    with pytest.raises(Problem, match="--context-until"):
        lm.loglikelihood(asked.make("loglikelihood", [("a b", " c")], task="unheard_of"))
    with pytest.raises(ValueError, match="nothing is a question"):
        lm.loglikelihood_rolling(asked.stories)


def test_every_method_counts_the_contexts_that_it_was_filled_from(loaded, asked):
    """Methods share one prefill, which each of them counts, once a context under `many-questions`; under
    `reuse` those that choose tokens are filled from another question's prompt besides, and `recompute` from
    nothing."""
    methods = ["full", "snapkv:budget=12,window=4", "int4", "recompute"]
    length = lambda text: len(loaded[1](text).input_ids)
    once = sum(map(length, CONTEXTS))
    whole = sum(length(f"{c}\nQuestion: {q}") for c in CONTEXTS for q in QUESTIONS)
    found = {}
    for protocol in (FIRST, MANY, REUSE):
        lm = KVLabLM(loaded[0], methods[0], tokenizer=loaded[1], protocol=protocol)
        lm.together(methods)
        for method in methods:
            lm.use(method)
            lm.loglikelihood(choices(asked), disable_tqdm=True)
            found[protocol, method] = tuple(lm.prefills().values())[:2]
        every = len(QUESTIONS) * once
        assert prefilled(lm) == {FIRST: every, MANY: once, REUSE: every + whole}[protocol]
    for method in methods[:3]:
        assert found[MANY, method] == (len(CONTEXTS), once)
    questions = len(CONTEXTS) * len(QUESTIONS)
    assert found[REUSE, "full"] == found[REUSE, "int4"] == (questions, len(QUESTIONS) * once)
    assert found[REUSE, methods[1]] == (questions, len(QUESTIONS) * once + whole)
    assert found[MANY, "recompute"] == found[REUSE, "recompute"] == (None, None)


@pytest.mark.parametrize("method, protocol", [
    ("kivi2:group=4,recent=6", FIRST), ("kivi4:group=8,recent=8", MANY), ("kivi2:group=4,recent=6", REUSE),
])  # fmt: skip
def test_questions_of_any_length_are_scored_as_alone_where_blocks_are_written(
    precise, asked, method, protocol
):
    """Padding between a context and a shorter question would take places in KIVI's blocks."""
    texts = [
        f"{context}\nQuestion:{end}" for context in CONTEXTS for end in ("", " who", " the brown dog ran")
    ]
    alone = scored(precise, asked, method, protocol, texts, batch_size=1)
    together = scored(precise, asked, method, protocol, texts, batch_size=64)
    assert together[0] == pytest.approx(alone[0], abs=1e-6) and together[1] == alone[1]
