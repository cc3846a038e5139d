"""A class of one's own that raises: one line that names it and its method, and the cause is kept."""

import random
from types import FunctionType

import pytest
from tiny import prompt, tiny

import kvlab
from kvlab.keep import H2O, RKV, ExpectedAttention, KVzip, LagKV, SnapKV
from kvlab.place import Device, InfiniGen, OnDemand, Quest, TopK
from kvlab.store import Int, Kivi

MADE = {  # a policy of one's own -> what makes it, from its class
    H2O: lambda own: {"keep": own(0.4)},
    SnapKV: lambda own: {"keep": own(0.4)},
    RKV: lambda own: {"keep": own(0.4)},
    KVzip: lambda own: {"keep": own(0.4)},
    TopK: lambda own: {"place": kvlab.place.Host(own())},
    Quest: lambda own: {"place": kvlab.place.Host(own())},
    InfiniGen: lambda own: {"place": kvlab.place.Host(own())},
    OnDemand: lambda own: {"place": kvlab.place.Host(own(memory=60))},
    Device: lambda own: {"place": own()},
    Int: lambda own: {"store": own(4)},
    Kivi: lambda own: {"store": own(2)},
}
RAISED = [
    KeyError("x"), ZeroDivisionError(), RuntimeError("one\ntwo"), NotImplementedError("d"), TypeError("a"),
    AttributeError("b"), StopIteration(), ValueError("c"), IndexError(), AssertionError(),
]  # fmt: skip


def hooks(base):
    """What kvlab may call of such a class."""
    found = {name: value for one in reversed(base.__mro__) for name, value in vars(one).items()}
    return {
        name: value
        for name, value in found.items()
        if name[0] != "_" and isinstance(value, FunctionType | property) and name != "ours"
    }


def used(model, made):
    cache = kvlab.KVCache(model, **made)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(40, 2))
    for step in range(3):
        stepper.feed(prompt(1, 2, step))
    cache.stats()
    stepper.feed(prompt(3, 2))
    cache.hold()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("base", MADE, ids=lambda base: base.__name__)
def test_an_error_in_ones_own_class_names_it(base, seed):
    """In each of its methods and properties, at the first call or at a later one, also from a parent of it
    that is no policy."""
    draw, model, met = random.Random(f"{base.__name__}{seed}"), tiny("llama"), []
    for name, right in hooks(base).items():
        error, after = draw.choice(RAISED), draw.choice((0, 0, 1, 5))
        calls = []

        def raises(self, *given, right=right, error=error, after=after, calls=calls, **named):
            calls.append(0)
            if len(calls) > after:
                raise error
            return right.fget(self) if isinstance(right, property) else right(self, *given, **named)

        said = {name: property(raises) if isinstance(right, property) else raises}
        if name == "choose" and getattr(base, "once", False):
            said["once"] = True  # or it would be refused
        mixed = draw.random() < 0.3
        own = type("Own", (type("Part", (), said), base) if mixed else (base,), {} if mixed else said)
        try:
            used(model, MADE[base](own))
        except (ValueError, TypeError) as told:
            whole, causes = told, []
            while whole is not None:
                causes.append(whole)
                whole = whole.__cause__
            assert f"Own.{name}" in str(told) and "\n" not in str(told), (name, str(told))
            assert error in causes and len(calls) > after, name
            met.append(name)
        else:
            assert len(calls) <= after, f"{name}: {type(error).__name__} was swallowed"
    assert met


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("base", [H2O, SnapKV, RKV, LagKV, ExpectedAttention])
def test_what_fails_in_kvlabs_code_for_what_ones_own_class_left_out_names_it(base, seed):
    """A class that takes part of its parent away, or hands it less than it was given."""
    draw = random.Random(f"{base.__name__}{seed}")
    name = draw.choice([one for one in ("observe", "note", "forget", "start") if hasattr(base, one)])
    less = draw.choice([lambda x: x[..., 1:], lambda x: x[:1], lambda x: x.tolist(), lambda x: None])

    def half(self, *given):
        if name != "start":
            given = [less(x) if hasattr(x, "tolist") else x for x in given]
        found = getattr(base, name)(self, *given) if name == "start" or draw.random() < 0.6 else None
        if name == "start":
            found.refill({one: None for one in found.contents()})
        return found

    own = type("Own", (base,), {name: half, "reads_queries": True, "observes": True})
    try:
        used(tiny("llama"), {"keep": own(0.4)})
    except (ValueError, TypeError) as told:
        assert "Own" in str(told) and "\n" not in str(told), str(told)


def test_the_class_itself_stays_as_it_was_written():
    """Its names, its signature and what it returns."""

    class Own(H2O):
        def score(self, layer):
            "What it says."
            return super().score(layer)

    assert Own.score.__doc__ == "What it says." and Own.score.__name__ == "score"
    assert H2O(4).score is not Own(4).score and "_tells" not in vars(H2O.score)
    model, found = tiny("llama"), []
    for keep in (H2O(12), Own(12)):
        found.append(kvlab.decode(model, prompt(40, 2), kvlab.KVCache(model, keep=keep), 6).logprobs)
    assert found[0].equal(found[1])


class KeysInPlace(H2O):
    def score(self, layer):
        keys, _ = layer.store.read(layer.slot_positions.device)
        keys /= keys.norm(dim=-1, keepdim=True)
        return super().score(layer)


class QueryInPlace(TopK):
    def select(self, layer, query):
        query *= 2
        return super().select(layer, query)


class PartsInPlace(Int):
    def decode(self, parts, dtype):
        parts[1].mul_(2)
        return super().decode(parts, dtype)


@pytest.mark.parametrize("own", [KeysInPlace, QueryInPlace, PartsInPlace])
def test_writing_in_place_to_what_one_is_given_is_refused(own):
    """It changes what the model then reads, without a word."""
    with pytest.raises(
        ValueError, match=rf"{own.__name__}\.\w+.*: it writes in place to a tensor that it was"
    ):
        kvlab.decode(
            tiny("llama"), prompt(40, 2), kvlab.KVCache(tiny("llama"), **MADE[own.__mro__[1]](own)), 6
        )
