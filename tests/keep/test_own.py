"""A keep of one's own that says nonsense: one line, at the prompt and at every step, in whatever code."""

import random
import re

import pytest
import torch
from families.models import family
from fuzz.cases import SHAPE, _model
from tiny import prompt, tiny

import kvlab
from kvlab.gather import in_order
from kvlab.keep import H2O, RKV, TOVA, AdaKV, ExpectedAttention, Keep, SnapKV

WRONG = {  # what becomes of a score [batch, kv_heads, slots]
    "one for all heads": lambda x: x[:, :1],
    "one for all rows": lambda x: x[:1],
    "no heads": lambda x: x.mean(1),
    "one more axis": lambda x: x[..., None],
    "too short": lambda x: x[..., 1:],
    "too long": lambda x: x.repeat(1, 1, 3),
    "far too many heads": lambda x: x.repeat(1, 5000, 1),
    "a number": lambda x: float(x.sum()),
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
    "sparse": lambda x: x.to_sparse(),
    "without numbers": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "NaN": lambda x: x.index_fill(-1, torch.tensor([random.randrange(x.shape[-1])]), torch.nan),
}


class Own(Keep):
    """Longest keys; from the pass `bad_from` on, or in one head, something that is no score."""

    def __init__(self, budget=0.5, wrong=None, bad_from=0, **more):
        super().__init__(budget, **more)
        self.wrong, self.bad_from = wrong, bad_from

    def start(self, layer):
        state = super().start(layer)
        state.passes = 0
        return state

    def observe(self, layer, received):
        layer.state.passes += 1

    def score(self, layer):
        keys, _ = layer.store.read(layer.slot_positions.device)
        right = keys.norm(dim=-1).round(decimals=3)
        bad = self.wrong is not None and layer.state.passes > self.bad_from
        return WRONG[self.wrong](right) if bad else right


def models():
    wide = {"hidden_size": 48, **SHAPE}
    return {
        "eager": tiny("llama", **wide),
        "at once": tiny("llama", **wide | {"head_dim": 32}),
        "compiled": _model("compiled"),
    }


@pytest.mark.parametrize("kind", ["eager", "at once", "compiled"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_score_that_is_none_is_one_line(wrong, kind):
    random.seed(wrong + kind)
    model, rows = models()[kind], 1 + (kind != "compiled")
    if wrong == "one for all rows" and rows == 1:
        return
    for when in (0, random.choice((1, 3))):
        for more in ({}, random.choice(({"chunk_length": 3}, {"every": 2}))):
            keep = Own(random.choice((0.4, 70)), wrong, when, **more)
            stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=keep))
            with pytest.raises(
                ValueError, match=r"^Own\.score, layer \d: (expected|KV head \d has NaN)"
            ) as said:
                stepper.feed(prompt(80, rows), last=True)
                for step in range(6):
                    stepper.feed(prompt(1, rows, step), last=True)
            assert "\n" not in str(said.value)
            assert stepper.cache.broken  # what is held is not whole
            with pytest.raises(RuntimeError, match="reset"):
                stepper.feed(prompt(1, rows))


@pytest.mark.parametrize("seed", range(8))
def test_the_newest_token_stays_however_large_the_scores_are(seed):
    """Means over chunks included, whose sums overflow."""
    draw = random.Random(seed)
    size = draw.choice([3e38, -3e38, float("inf"), -float("inf")])

    class Huge(Own):
        def score(self, layer):
            return torch.full(layer.slot_positions.shape, size)

    keep = Huge(draw.randrange(3, 12), chunk_length=draw.choice([1, 2, 3, 7]))
    stepper = kvlab.Stepper(tiny("llama"), kvlab.KVCache(tiny("llama"), keep=keep))
    for tokens in (24, 1, 1, 5, 1):
        stepper.feed(prompt(tokens, 2))
        for layer in stepper.cache.layers:
            assert (layer.slot_positions.amax(-1) == stepper.cache.get_seq_length() - 1).all()


@pytest.mark.parametrize("seed", range(20))
def test_a_rule_of_ones_own_is_looked_at(seed):
    """In every keep that asks for it, by itself and inside another."""
    draw = random.Random(seed)
    random.seed(seed)
    wrong = draw.choice([WRONG[name] for name in WRONG if name != "NaN"] + [lambda x: x.int(), lambda x: x])
    base = draw.choice((Own, H2O, SnapKV, TOVA))
    said = {"by_rule": lambda self, layer: wrong(layer.slot_positions.float())}
    keep = type("Ruled", (base,), said)(6, **draw.choice(({}, {"chunk_length": 3})))
    model = models()["eager"]
    cache = kvlab.KVCache(model, keep=draw.choice((keep, AdaKV(keep))))
    with pytest.raises(ValueError, match=r"^Ruled\.by_rule, layer 0: expected bool .*, got [^\n]*$"):
        kvlab.Stepper(model, cache).feed(prompt(20, 2))


SHARES = [torch.ones(shape).long() for shape in ((), (2, 1), (1, 3), (2, 3, 1))]
SHARES += [torch.tensor([[5, 5, 5], [7, 5, 0]]), torch.full((2, 3), 5.0)]
LIMITS = [5], [5, None], [0, 5], [5.5, 5], (5, 5), 5, torch.tensor([5, 5]), [True, 5], [5, 10**30]
NUMBERS = [(AdaKV, "shares", said, r"\[batch, kv_heads\] of int above 0") for said in SHARES]
NUMBERS += [(Own, "limits", said, "a whole number above 0") for said in LIMITS]
NUMBERS += [(Own, "shares", torch.full((2, 3), 5), "None of a keep that")]


@pytest.mark.parametrize("base, name, said, expected", NUMBERS)
def test_shares_and_limits_of_ones_own_are_looked_at(base, name, said, expected):
    own, model = type("Told", (base,), {name: lambda *_: said}), models()["eager"]
    keep = own(Own(6) if base is AdaKV else 6)
    with pytest.raises(ValueError, match=rf"Told\.{name}, layer 0: expected {expected}"):
        kvlab.Stepper(model, kvlab.KVCache(model, keep=keep)).feed(prompt(20, 2))


FAULTS = ("none", "order", "twice", "newest", "beyond", "below", "int32", "heads", "list")


@pytest.mark.parametrize("seed", range(24))
def test_slots_of_ones_own_are_looked_at(seed):
    """Slots drawn at random: those in order with the newest among them are kept, all others refused."""
    draw, says = random.Random(seed), seed % 2

    class Chooses(Keep):
        def choose(self, layer):
            if says:
                layer.state.limits = layer.state.longest = [min(7, held) for held in layer.rows_held]
            shape, slots = layer.slot_positions.shape[:2], layer.slots
            fault = draw.choice(FAULTS)
            found = torch.stack([torch.tensor(sorted(draw.sample(range(slots - 1), 6)) + [slots - 1])
                                 for _ in range(shape.numel())]).view(*shape, 7)  # fmt: skip
            at = draw.randrange(shape[0]), draw.randrange(shape[1])
            if fault in ("order", "newest"):
                found[at] = found[at].flip(0) if fault == "order" else torch.arange(7)
            elif fault == "twice":
                found[(*at, 3)] = found[(*at, 2)]
            elif fault in ("beyond", "below"):
                found[(*at, 6)] = slots + draw.randrange(10**6) if fault == "beyond" else -2
            found = {"int32": found.int(), "heads": found[:, :1], "list": found.tolist()}.get(fault, found)
            faults.append(fault)
            return found

    faults, model = [], models()["at once"]
    stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=Chooses()))
    try:
        for step in range(20):
            stepper.feed(prompt(20 if step == 0 else 1, 2, step))
            assert stepper.cache.stats().tokens_held == 7
    except ValueError as error:
        assert faults[-1] != "none" and str(error).startswith("Chooses.choose, layer ")
    assert faults[:-1] == ["none"] * (len(faults) - 1)


def test_sums_of_ones_own_kind_stay_out_of_compiled_code():
    class Halves(H2O):
        def observe(self, layer, received):
            super().observe(layer, received)
            layer.state.received = layer.state.received.double()

    model, found = models()["compiled"], []
    for keep in (H2O(30), Halves(30)):
        cache = kvlab.KVCache(model, keep=keep)
        found.append(kvlab.decode(model, prompt(80), cache, 20))
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert (found[0].logprobs - found[1].logprobs).abs().max() < 1e-4


FINE = ("nothing", "one for all heads", "one more axis", "complex", "quantized")
REMEMBERED = {  # per slot, then per row; x: what a slot received [batch, kv_heads, slots]
    **{name: wrong for name, wrong in WRONG.items() if name not in FINE},
    "a column too many": lambda x: torch.nn.functional.pad(x, (0, 1)),
    "two heads more": lambda x: torch.cat([x, x], 1),
    "a tuple with a number": lambda x: (x, 3),
}
ROWS = {
    "a number": lambda x: 3,
    "one for all": lambda x: x.sum(),
    "one row too many": lambda x: torch.zeros(len(x) + 1),
    "a short list": lambda x: [1] * (len(x) - 1),
    "sparse": lambda x: torch.zeros(len(x)).to_sparse(),
}


@pytest.mark.parametrize("kind", ["eager", "at once", "compiled"])
@pytest.mark.parametrize("wrong", [*REMEMBERED, *(f"row: {name}" for name in ROWS)])
def test_what_a_keep_of_ones_own_remembers_is_looked_at(wrong, kind):
    """At the prompt, at a step, in pieces; by itself and in another keep; whether it asks for attention."""
    random.seed(wrong + kind)
    model, rows, of_row = models()[kind], 1 + (kind != "compiled"), wrong.startswith("row: ")
    if wrong == "one for all rows" and rows == 1:
        return
    for when, observes in ((0, True), (random.choice((1, 3)), True), (0, False), (2, False)):
        base = H2O if observes else Own

        class Spoils(base):
            per_slot, per_row = ("received",), ("noted",)

            def observe(self, layer, received):
                super().observe(layer, received)
                state, seen = layer.state, max(layer.lengths)
                right = layer.slot_positions.float() if received is None else state.received
                bad = seen >= 80 + when  # noqa: B023
                if of_row:
                    state.noted = ROWS[wrong[5:]](right) if bad else None
                else:
                    state.received = REMEMBERED[wrong](right) if bad else right

            def score(self, layer):
                received = layer.state.received
                return layer.slot_positions.float() if received is None else received

        keep = Spoils(random.choice((0.4, 70)))
        keep = AdaKV(keep) if kind == "eager" and random.random() < 0.3 else keep
        stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=keep))
        said_by = "score" if wrong == "NaN" else "observe"
        with pytest.raises(ValueError, match=rf"^Spoils\.{said_by}, layer \d: [^\n]*$"):
            if random.random() < 0.3:
                stepper.feed(prompt(80, rows), chunk=random.randrange(5, 40))
            else:
                stepper.feed(prompt(80, rows), last=True)
            for step in range(6):
                stepper.feed(prompt(1, rows, step), last=True)
        assert stepper.cache.broken


@pytest.mark.parametrize("base", [H2O, TOVA, SnapKV, ExpectedAttention, RKV])
def test_a_class_that_takes_away_what_it_inherits_from(base):
    """One line, as it is, and inside of AdaKV; with a score and an observation of its own it works."""
    taken = {"observes": False, "reads_queries": False, "per_slot": (), "per_row": (), "shared": ()}
    for name, value in taken.items():
        if getattr(base, name) == value:
            continue
        own = type("Own", (base,), {name: value})
        for keep in (own(0.4), AdaKV(own(0.4))):
            with pytest.raises(ValueError, match=r"^Own: \w+\.\w+, which it inherits, needs [^\n]*$"):
                kvlab.KVCache(tiny("llama"), keep=keep)
    mine = {"score": lambda self, layer: layer.slot_positions.float(), "observe": lambda *_: None}
    own = type("Own", (base,), mine | {"observes": False})
    kvlab.decode(tiny("llama"), prompt(20), kvlab.KVCache(tiny("llama"), keep=own(0.4)), 3)


def test_lists_and_states_that_are_none():
    ways = [{name: value} for name in ("per_slot", "per_row", "states") for value in (None, "x", ["x"])]
    ways += [{"last_queries": value} for value in ("x", 0, -1, 2.5)]
    for base in (H2O, SnapKV, TOVA):
        for way in ways:
            with pytest.raises((ValueError, TypeError), match=r"^(Own\.)?\w+=?[^\n]*$"):
                kvlab.KVCache(tiny("llama"), keep=type("Own", (base,), way)(0.4))
        for state in (lambda *_: None, lambda self, layer: H2O(0.2).start(layer)):
            with pytest.raises((ValueError, TypeError), match=r"^Own\.start[^\n]*$"):
                kvlab.KVCache(tiny("llama"), keep=type("Own", (base,), {"start": state})(0.4))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Llama 4"])
def test_a_row_whose_newest_token_went_is_numbered_by_all_it_has_seen(name):
    """Also after a pass in which it has no token."""

    class Early(Keep):
        once, newest_stays = True, False

        def choose(self, layer):
            newest = layer.slot_positions == layer.slot_positions.amax(-1, keepdim=True)
            return in_order(~newest) if layer.in_prompt else None

    model, ids, more = kvlab.prepare(family(name)), prompt(6, 2), prompt(3, 2, seed=1)
    together, alone = (kvlab.Stepper(model, kvlab.KVCache(model, keep=Early(0.5))) for _ in "ab")
    together.feed(ids)
    alone.feed(ids[1:])
    for one in (together, alone):
        one.cache.hold()
    together.feed(more, torch.tensor([[1, 1, 1], [0, 0, 0]]))
    for token in prompt(4, 2, seed=2).split(1, 1):
        found, right = together.feed(token), alone.feed(token[1:])
        torch.testing.assert_close(found[1:], right, atol=1e-4, rtol=0)
    for layer, other in zip(together.cache.layers, alone.cache.layers, strict=True):
        held = lambda heads: [[p for p in head if p >= 0] for head in heads.tolist()]
        assert held(layer.positions[1]) == held(other.positions[0])


class Again(Keep):
    """As KVzip, the whole prompt at once."""

    once = rereads = True
    per_slot = ("scores",)

    def again(self, layer, model, ids, real):
        found = type(self).passes(ids, real)
        return [found] if isinstance(found, tuple) else found

    def hear(self, layer, given, asked, positions, part):
        there = positions[:, :, None]
        seen = (there >= 0) & (there <= asked[:, None, :, None])
        layer.state.scores = given.attend_to(given.keys, None, seen, asked >= 0)[1][..., : layer.slots]

    def score(self, layer):
        return layer.state.scores.round(decimals=3)


@pytest.mark.parametrize(
    "passes, said",
    [
        (lambda ids, real: (ids, real, None), None),
        (lambda ids, real: None, "expected to yield (ids, real, part) at least once"),
        (lambda ids, real: [], "expected to yield (ids, real, part) at least once"),
        (lambda ids, real: (ids, real), "expected (ids, real, part)"),
        (lambda ids, real: (ids + 1000, real, 0), "expected at least one token in each row, of 96"),
        (lambda ids, real: (ids[:1], real[:1], 0), "expected ids of 2 rows"),
        (lambda ids, real: (ids.float(), real, 0), "expected ids of 2 rows"),
        (lambda ids, real: (ids, real.long(), 0), "expected bool (2, 40)"),
        (lambda ids, real: (ids[:, :0], real[:, :0], 0), "expected at least one token"),
    ],
)
def test_what_a_keep_of_ones_own_reads_again_is_looked_at(passes, said):
    own = type("Own", (Again,), {"passes": staticmethod(passes)})
    model = tiny("llama")
    stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=own(0.5)))
    if said is None:
        stepper.feed(prompt(40, 2))
        assert stepper.cache.stats().tokens_held == 20
    else:
        with pytest.raises(ValueError, match=r"^Own\.again, layer 0: " + re.escape(said)):
            stepper.feed(prompt(40, 2))
