"""What a prompt is: in pieces it is what it is in one pass, and a later turn is one again."""

import copy
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from every import COMPOSED, EVERY, EVICTING, make
from families.models import family
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.keep import Keep
from kvlab.methods import CHOSEN, METHODS

HOW = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WINDOW = {name: ",window=4" for name in ("snapkv", "pyramidkv", "rkv")}
KEPT = [name for name, one in METHODS.items() if one.family == CHOSEN and name != "kvzip"]  # one prompt


def held(cache):
    """Bytes, tokens and positions of what it holds, and its own idea of where the prompt has ended."""
    stats, spec = cache.stats(), cache.spec
    device = (
        None if spec and "link" in spec.parameters else stats.device_bytes
    )  # a link's buffers, among them
    at = [layer.positions.sort(-1).values for layer in cache.attending]
    return (device, stats.host_bytes, stats.tokens_seen, stats.tokens_held, stats.scored), at


def same(one, other):
    assert one[0] == other[0]
    assert all(map(torch.equal, one[1], other[1]))


def said(model, cache, ids, chunk, mask=None):
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, past_key_values=cache,
        max_new_tokens=4, prefill_chunk_size=chunk, **HOW,
    )  # fmt: skip
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("spec", EVERY[::3])  # a Stepper's pieces, of every method: tests/fuzz
def test_pieces_equal_one_pass(spec):
    """Tokens, bytes and kept sets; the last piece has one token, or two. And `generate` says what kvlab's own
    loop does."""
    model = tiny("llama")
    ids, mask = left_padded([prompt(31), prompt(22, seed=1)])
    alone = kvlab.decode(model, ids, make(model, spec), 4, attention_mask=mask).tokens
    found = []
    for chunk in (None, 10, 29):
        cache = make(model, spec)
        found.append((said(model, cache, ids, chunk, mask), held(cache)))
    assert torch.equal(found[0][0], alone)
    for tokens, kept in found[1:]:
        assert torch.equal(tokens, found[0][0])
        same(kept, found[0][1])


def chat(model, cache, turns, cuts, rest):
    """Bare passes: every turn, cut into pieces, and two new tokens; what was held when each had ended."""
    kept = []
    for number, size in enumerate(turns):
        rest(size)
        ids, ends = prompt(size, seed=number), [0, *(cut for cut in cuts if cut < size - 1), size]
        for start, end in pairwise(ends):
            bare(model, cache, ids[:, start:end])
        kept.append(held(cache))
        for step in range(2):
            bare(model, cache, prompt(1, seed=step))
    return kept


@torch.no_grad()
def bare(model, cache, ids):
    """The logits of a pass of somebody who says nothing of prompts."""
    return model(ids, past_key_values=cache).logits


@dataclass(frozen=True)
class Told(Keep):
    """A keep of one's own: the tokens that it was told of longest ago, and how often it was."""

    budget: float | int = 0.4
    per_slot = ("told",)

    def observe(self, layer, received):
        before, now = layer.state.told, torch.ones(layer.slot_positions.shape)
        if before is not None:
            now[..., : before.shape[2]] += before
        layer.state.told = now

    def score(self, layer):
        return layer.state.told


@dataclass(frozen=True)
class ToldOnce(Told):
    """It does not forget when the prompt has ended."""

    once = True


@pytest.mark.parametrize("seed", range(16))
def test_a_turn_in_pieces_leaves_windows_as_in_one(seed):
    """What a keep remembers of each token goes along, though it is told of a turn when that has ended."""
    dice = random.Random(seed)
    model = kvlab.prepare(family(dice.choice(["Mistral", "Gemma 3", "Llama 4", "Llama"])))
    pool = f"infinigen:budget=0.3,pool=0.7,alpha=inf,victim={dice.choice(['fifo', 'lru', 'counter'])}"
    keep, rows = dice.choice([pool, pool, Told(), ToldOnce(), "h2o:budget=0.4"]), dice.choice([1, 2])
    sizes = [dice.randint(7, 30), *[1] * dice.choice([0, 3]), dice.randint(5, 20)]
    cuts = sorted(dice.sample(range(2, sizes[-1] - 1), 1 + (sizes[-1] > 8)))
    pieces = [end - start for start, end in pairwise([0, *cuts, sizes[-1]])]
    if 1 in pieces:
        pieces = [sizes[-1] - 2, 2]
    found = []
    for turn in (sizes[-1:], pieces):
        cache = kvlab.make_cache(model, keep)
        for size in sizes[:-1]:
            bare(model, cache, prompt(size, rows, seed))
        for ids in prompt(sizes[-1], rows, seed).split(turn, 1):
            bare(model, cache, ids)
        said = [bare(model, cache, prompt(1, rows, step)) for step in range(12)]
        found.append((torch.cat(said, 1), held(cache)))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4), keep
    same(found[0][1], found[1][1])


def means(kept):
    """Tokens held by each layer, mean over its heads."""
    return [float((at >= 0).sum(-1).double().mean()) if len(at) else 0.0 for at in kept[1]]


@pytest.mark.parametrize("seed", range(6))
def test_a_turn_under_kivi_sees_what_its_tokens_one_by_one_would(seed):
    """A block is rounded between two tokens of the turn, however it is cut."""
    dice = random.Random(seed)
    model = tiny("llama", dtype=torch.float64)
    spec = f"kivi{dice.choice([2, 4])}:group={dice.choice([1, 3, 4, 8])},recent={dice.choice([0, 5, 6])}"
    size, rows, found = dice.randint(9, 30), dice.choice([1, 2]), []
    for pieces in ([size], [1] * size, [dice.randint(2, 5)] * (size // 5) + [size]):
        stepper = kvlab.Stepper(model, make(model, spec))
        stepper.feed(prompt(12, rows, seed=1))
        said = torch.cat([stepper.feed(ids) for ids in _split(prompt(size, rows, seed=2), pieces)], 1)
        found.append((said, held(stepper.cache)))
    for said, kept in found[1:]:
        torch.testing.assert_close(said, found[0][0], atol=1e-9, rtol=0)
        same(kept, found[0][1])


def _split(ids, sizes):
    """Pieces of these sizes, the last one as long as what is left."""
    ends = [min(sum(sizes[: i + 1]), ids.shape[1]) for i in range(len(sizes))]
    return [ids[:, start:end] for start, end in pairwise([0, *ends]) if end > start]


@pytest.mark.parametrize("method", KEPT)
@pytest.mark.parametrize("budget", [0.5, 12])
def test_a_chat_holds_its_budget(method, budget):
    """min(budget of what was seen, what was held and the turn), however short the first message is."""
    model = tiny("llama", dtype=torch.float64)
    cache = kvlab.make_cache(model, f"{method}:budget={budget}{WINDOW.get(method, '')}")
    before, limits = [], []

    def rest(size):
        before.append(means(held(cache)))
        seen = cache.get_seq_length() + size
        limits.append(3 * [budget if budget > 1 else int(budget * seen + 1e-6)])
        if method == "pyramidkv":
            shares = [cache.layers[0].keep.policy.share(index, 3) for index in range(3)]
            limits[-1] = [
                min(seen, max(4, int(x * y + 1e-6))) for x, y in zip(limits[-1], shares, strict=True)
            ]

    kept = chat(model, cache, (5, 40, 4, 17), (2, 9), rest)
    for one, limit, now, size in zip(before, limits, kept, (5, 40, 4, 17), strict=True):
        assert means(now) == [
            min(most, held_before + size) for most, held_before in zip(limit, one, strict=True)
        ]


FIRST = [spec for spec in EVICTING if spec not in COMPOSED]


@pytest.mark.parametrize("spec", FIRST)
def test_the_first_prompt_alone(spec):
    """turns=first: what comes later continues the text, as it does for a Stepper."""
    model = tiny("llama", dtype=torch.float64)
    passes = [prompt(size, 2, seed=size) for size in (12, 1, 9, 1, 6, 1)]
    stepper = kvlab.Stepper(model, make(model, spec))
    expected = [stepper.feed(ids).double() for ids in passes]
    once = make(model, f"{spec}{',' if ':' in spec else ':'}turns=first")
    found = [bare(model, once, ids) for ids in passes]
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(found, expected, strict=True))
    assert held(once)[0][:-1] == held(stepper.cache)[0][:-1]
    assert all(map(torch.equal, held(once)[1], held(stepper.cache)[1]))


def test_nothing_reopens_after_hold():
    model = tiny("llama")
    cache = kvlab.make_cache(model, "h2o:budget=0.5")
    bare(model, cache, prompt(20))
    cache.hold()
    bare(model, cache, prompt(8))
    bare(model, cache, prompt(1))
    assert cache.stats().tokens_held == 10 + 9


def test_who_asks_ends_a_prompt(tmp_path):
    """What comes after that in several tokens is a later turn, whose budget is of all that was seen."""
    model = tiny("llama")
    asks = {
        "nobody": lambda cache: None, "stats": lambda cache: cache.stats(), "copy": copy.deepcopy,
        "save": lambda cache: cache.save(tmp_path / "it"), "crop": lambda cache: cache.crop(0),
        "fork": lambda cache: cache.reorder_cache(torch.tensor([0])), "rows": lambda cache: cache.lengths,
        "keys": lambda cache: cache.attending[0].keys,
        "copies of rows": lambda cache: cache.batch_repeat_interleave(1),
    }  # fmt: skip
    for name, ask in asks.items():
        cache = kvlab.make_cache(model, "sinks:budget=0.5")
        bare(model, cache, prompt(10))
        ask(cache)
        bare(model, cache, prompt(20))
        assert cache.stats().tokens_held == 15
        first = cache.layers[0].positions[0, 0].tolist()
        assert first == [*range(4), *range(19, 30)], name


def test_a_keep_that_rereads_takes_one_prompt():
    model = tiny("llama")
    cache = kvlab.make_cache(model, "kvzip:budget=0.5")
    bare(model, cache, prompt(20))
    bare(model, cache, prompt(1))
    before = held(cache)
    with pytest.raises(ValueError, match=r"^turns=all: KVzip reads a prompt again.*expected turns=first"):
        bare(model, cache, prompt(3))
    same(held(cache), before)
    bare(model, cache, prompt(1))  # nothing is broken
    cache = kvlab.make_cache(model, "kvzip:budget=0.5,over=head,turns=first")
    for tokens in (20, 1, 3):
        bare(model, cache, prompt(tokens))
    assert means(held(cache)) == 3 * [10 + 1 + 3]


def test_pieces_of_one_token_are_refused_in_one_line():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"^prefill_chunk_size=1.*expected pieces of at least 2[^\n]*$"):
        said(model, kvlab.make_cache(model, "h2o"), prompt(9), 1)
    assert torch.equal(
        said(model, kvlab.make_cache(model, "h2o"), prompt(9), 8),
        said(model, kvlab.make_cache(model, "h2o"), prompt(9), None),
    )


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "topk:budget=0.3",
        "quest:budget=0.4,page=3,full_layers=1",
        "infinigen:budget=0.4",
        "shadowkv:budget=0.3,rank=0.4,chunk=3",
    ],
)
def test_a_later_turn_that_ends_with_a_piece_of_one_token(spec):
    """Thirteen tokens in pieces of six are one pass, or refused in one line."""
    model = tiny("llama")
    first, then, found = prompt(30), prompt(12, seed=1), []
    for pieces in ({}, {"prefill_chunk_size": 6}):
        cache = kvlab.make_cache(model, spec)
        said = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        said |= {"output_logits": True, "return_dict_in_generate": True}
        ids = model.generate(first, **said).sequences
        try:
            found.append(model.generate(torch.cat([ids, then], 1), **said, **pieces).logits[0])
        except ValueError as error:
            assert pieces and "shadowkv" in spec and "expected pieces of another size" in str(error)
            return
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("seed", range(12))
def test_a_mask_that_says_otherwise_of_earlier_tokens(seed):
    """A row hides or shows tokens that came earlier: one line, in every pass."""
    random.seed(seed)
    model, spec = tiny(random.choice(("llama", "mistral"))), random.choice(EVERY)
    ids, mask = left_padded([prompt(random.randrange(3, 30)), prompt(30)])
    cache = make(model, spec)
    cut = random.choice((None, random.randrange(2, 28)))
    for part in (slice(0, cut), slice(cut, None))[: 1 if cut is None else 2]:
        seen = cut if part.start == 0 and cut else 30
        with torch.no_grad():
            model(ids[:, part], attention_mask=mask[:, :seen], past_key_values=cache)
    for tokens in (1, 3):
        wrong = torch.cat([mask, torch.ones(2, tokens)], 1).long()
        row, column = random.randrange(2), random.randrange(30)
        wrong[row, column] = 1 - wrong[row, column]
        with pytest.raises(ValueError, match=r"^attention_mask: \[[^\n]*$"):
            model(prompt(tokens, 2), attention_mask=wrong, past_key_values=copy.deepcopy(cache))


def test_the_next_token_of_a_row_that_ends_with_padding():
    model = tiny("llama")
    ids, mask = prompt(9, rows=2), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    cache, said = kvlab.make_cache(model, "h2o"), r"^attention_mask: a row ends with padding"
    with pytest.raises(ValueError, match=said):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match=f"{said}; expected padding on the left"):
        kvlab.decode(model, ids, kvlab.make_cache(model, "h2o"), 2, mask)
    alone = kvlab.Stepper(model, kvlab.make_cache(model, "h2o")).feed(ids[1:, :6])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(whole[1, :6], alone[0], atol=1e-4)


@pytest.mark.parametrize("idiom", ["counted from the mask", "the end of a range", "cut from one tensor"])
@pytest.mark.parametrize("spec", ["h2o:budget=10", "int2", "topk:budget=0.3", "kivi2", "sinks:budget=10"])
def test_positions_of_a_loop_by_hand_are_those_of_new_tokens(spec, idiom):
    """They are views of longer tensors, as those of a piece, but not of the prompt's."""
    model, (ids, mask) = tiny("llama"), left_padded([prompt(24), prompt(19, seed=1)])
    if idiom != "counted from the mask":
        ids, mask = prompt(24, 2), torch.ones(2, 24, dtype=torch.long)
    whole = torch.arange(40)[None]

    def decoded(view) -> list:
        seen, cache = mask, kvlab.make_cache(model, spec)
        first = (mask.cumsum(-1) - 1).clamp(min=0) if idiom == "counted from the mask" else whole[:, :24]
        with torch.no_grad():
            said = [model(ids, attention_mask=mask, position_ids=first, past_key_values=cache).logits[:, -1]]
            for step in range(6):
                seen = torch.cat([seen, seen.new_ones(2, 1)], 1)
                at = {
                    "counted from the mask": (seen.cumsum(-1) - 1)[:, -1:],
                    "the end of a range": torch.arange(25 + step)[-1:][None],
                    "cut from one tensor": whole[:, 24 + step : 25 + step],
                }[idiom]
                given = {"attention_mask": seen, "position_ids": view(at), "past_key_values": cache}
                said.append(model(said[-1].argmax(-1, keepdim=True), **given).logits[:, -1])
        return said

    for found, right in zip(decoded(lambda at: at), decoded(torch.Tensor.clone), strict=True):
        assert torch.equal(found, right)
