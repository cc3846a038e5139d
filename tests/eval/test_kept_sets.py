"""What is held of a context does not depend on the question, bit by bit, under every keep that evicts.

Two questions of other lengths are asked of the same contexts, and the kept sets compared: once the context
has been compressed, and once the question has been fed.
"""

import copy

import pytest
import torch
from cut_examples import SHOTS, SYSTEM, chatting
from families import profiles
from tiny import LOSSY, policies

from eval.accuracy import KVLabLM, scoring
from eval.accuracy.protocols import FIRST, MANY
from kvlab.spec import name_of

CONTEXTS = [
    "Tom ran home.",
    "Otis owns the brown dog. Mira owns the red hen. Tom ran home under the old bridge with a loaf.",
    "Once there was a small boat on a wide lake. Mira found a red key. The baker gave Tom a warm loaf. "
    "Ada has a boat, too; she keeps it in the shed, under the old bridge, and nobody knows where the key is.",
]
QUESTIONS = ["the dog", "a\nquite other one, about the key under the bridge: 1, 2 or 3?", "who ran home"]
EVICTING = [
    spec
    for spec in (*LOSSY, *profiles.LOSSY)
    if name_of(spec) in profiles.SETTINGS or ("keep" in policies(spec) and policies(spec)["keep"].evicts)
]


def kept(setting, method, questions, protocol=FIRST, size=64, turns=None) -> list:
    """Which tokens of its context every row holds, `[rows, kv_heads, tokens]`, batch by batch and layer by
    layer: once the context has been compressed and, of one question on each, once that has been fed.

    turns: those before each prompt, which stands in a template then.
    """
    model, tokenizer, make = setting
    how = {"tokenizer": tokenizer, "protocol": protocol, "batch_size": size}
    lm = KVLabLM(model, profiles.profiled(method, model), **how)
    found, shared = [], scoring.shared

    def look(cache, lengths: list[int]) -> None:
        for layer in cache.attending:
            positions = layer.positions
            held = torch.zeros(*positions.shape[:2], lm.max_length + 1, dtype=torch.bool)
            held.scatter_(2, positions.where(positions >= 0, lm.max_length), True)
            own = torch.arange(lm.max_length) < torch.tensor(lengths)[:, None]
            found.append((held[..., :-1] & own[:, None])[..., : max(lengths)])

    def spied(*arguments, **how):
        for name, stepper, logits in shared(*arguments, **how):
            lengths = list(stepper.cache.attending[0].lengths)
            look(stepper.cache, lengths)
            yield name, stepper, logits
            if len(questions) == 1:
                look(stepper.cache, lengths)

    texts = [f"{one}\nQuestion: {question}" for one in CONTEXTS for question in questions]
    if turns is not None:
        chats = ([*turns, {"role": "user", "content": text}] for text in texts)
        texts = [lm.apply_chat_template(chat) for chat in chats]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "shared", spied)
        lm.loglikelihood(make("loglikelihood", [(text, " O") for text in texts], "recall"), True)
    return found


@pytest.fixture
def setting(loaded, asked):
    """(model, tokenizer, makes requests)."""
    return (*loaded, asked.make)


def equal(one: list, other: list) -> bool:
    """In every layer, row and head of every batch."""
    assert len(one) == len(other) > 0
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", EVICTING)
def test_another_question_leaves_the_kept_sets_as_they_are(setting, method):
    first, other = (kept(setting, method, [question], size=1) for question in QUESTIONS[:2])
    assert equal(first, other) and {len(one) for one in first} == {1}
    assert not all(one.all() for one in first)  # something was let go
    first, other = (kept(setting, method, pair, MANY) for pair in (QUESTIONS[:2], QUESTIONS[1:]))
    assert equal(first, other)


@pytest.mark.parametrize("turns", [[], [SYSTEM], [SYSTEM, *SHOTS]])
def test_so_it_is_in_a_chat_template(setting, turns):
    """Whose special tokens are characters of the prompt."""
    method = "snapkv:budget=0.4,window=4"
    model, tokenizer = copy.deepcopy(setting[0]), chatting(setting[1])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    found = [kept((model, tokenizer, setting[2]), method, [one], size=1, turns=turns) for one in QUESTIONS]
    assert all(equal(found[0], other) for other in found[1:])
    assert not all(one.all() for one in found[0])
