"""A step in one call: what is written has the formats' bits, and what cannot go so goes as before."""

import copy

import pytest
import torch
from fast.atonce import life
from tiny import begun, left_padded, prompt, started, tiny

import kvlab
from kvlab.fast import Fused, reference
from kvlab.fast.turning import turned
from kvlab.keep import Sinks
from kvlab.measure.timeline import record
from kvlab.place import Host
from kvlab.store import Exact, Float4, Float8, Growing, Int, Kivi, Paged, Rotated, Static

HEAD = 32
FORMS = {
    "full": Exact(),
    **{f"int{bits}": Int(bits) for bits in range(2, 9)},
    **{f"int{bits}-g8": Int(bits, 8) for bits in (4, 5, 8)},
    **{form: Float8(form) for form in Float8.TYPES},
    "nvfp4": Float4(),
    "mxfp4": Float4("mxfp4"),
    "rotated": Rotated(Int(4)),
    "rotated-signs": Rotated(Int(5), True),
}


def stores(form, dtype=torch.float32, buffer=Growing, tokens=5):
    """Two that hold the same five tokens in three rows and two heads."""
    first = torch.randn(2, 3, 2, tokens, HEAD).to(dtype)
    made = [started(buffer(format=form), HEAD, 2, 400) for _ in range(2)]
    for store in made:
        store.append(*first)
    return made


def tokens(count: int):
    """K and V of single tokens from 1e-9 to 1e4, with zeros, with whole numbers, and with ties."""
    for index in range(count):
        keys, values = torch.randn(2, 3, 2, 1, HEAD) * 10.0 ** torch.empty(2, 3, 2, 1, 1).uniform_(-9, 4)
        keys[0] = 0 if index % 7 == 0 else keys[0]
        values = (values / values.abs().amax() * 448).round() / (2 if index % 3 else 1)
        yield keys, values


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_has_the_bits_of_the_format(name):
    torch.manual_seed(0)
    fused, plain = stores(FORMS[name])
    went = 0
    most = {"e4m3": 448.0, "nvfp4": 2688.0}.get(name, torch.inf)  # of formats that have no scale of a tensor
    for keys, values in tokens(150):
        keys, values = keys.clamp(-most, most), values.clamp(-most, most)
        plain.append(keys, values)
        query = torch.randn(3, 4, 1, HEAD) / 1e5  # so that scores are small, and exact
        step = Fused.of(fused, query)
        if (out := step.call(fused, query, keys, values, 0.2)) is None:  # its buffer is full
            fused.append(keys, values)
            continue
        went += 1
        both = [(*store.parts()[0], *store.parts()[1]) for store in (fused, plain)]
        for mine, theirs in zip(*both, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        right = reference(query, plain, 0.2)
        assert (out - right).abs().max() <= 1e-5 * right.abs().max()
    assert went > 130 and fused.length == plain.length == 155


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("head_dim", [2, 32, 80, 96, 160])
def test_vectors_are_turned_to_the_bit(head_dim, signs):
    """Blocks of 2 to 32 channels; what is turned is turned back."""
    torch.manual_seed(0)
    form, x = Rotated(Int(8), signs), torch.randn(3, 5, 7, head_dim).transpose(0, 1)
    found = turned(form, x)
    assert torch.equal(found, form.turn(x)) and (found - x).abs().max() > 0.1
    assert torch.equal(turned(form, found, back=True), form.turn_back(found))
    assert turned(Int(8), x) is x
    for wrong in (torch.nan, torch.inf, 7e4):
        x[2, 1, 3, 1] = wrong
        assert turned(form, x) is None and turned(form, x, back=True) is not None


def test_bf16_is_kept_and_read_as_it_is():
    torch.manual_seed(0)
    fused, plain = stores(Exact(), torch.bfloat16)
    for _ in range(20):
        keys, values, query = (torch.randn(3, 2, 1, HEAD).bfloat16() for _ in range(3))
        plain.append(keys, values)
        out = Fused.of(fused, query).call(fused, query, keys, values, 0.2)
        if out is None:
            fused.append(keys, values)
            continue
        assert torch.equal(fused.parts()[0][0], plain.parts()[0][0]) and out.dtype == torch.bfloat16
        held = (part.float() for parts in plain.parts() for part in parts)
        right = kvlab.attention.attend(query.float(), *held, 0.2)[0]
        assert (out.float() - right).abs().max() <= 0.01 * right.abs().max()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 65504 * 128.0])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ["int8", "int4", "e4m3", "int5", "nvfp4", "rotated"])
def test_a_token_that_the_format_refuses_changes_nothing(name, side, wrong):
    if name in ("e4m3", "nvfp4") and wrong < float("inf"):
        pytest.skip("floats store their largest value instead")
    store, _ = stores(FORMS[name], buffer=Static)
    both, query = torch.randn(2, 3, 2, 1, HEAD), torch.randn(3, 2, 1, HEAD)
    both[side, 1, 1, 0, 17] = wrong
    before = [part.clone() for parts in store.parts() for part in parts]
    assert Fused.of(store, query).call(store, query, *both, 0.2) is None
    after = [part for parts in store.parts() for part in parts]
    assert store.length == 5 and all(map(torch.equal, before, after))


def llama():
    return tiny("llama", hidden_size=128, num_key_value_heads=2)  # heads of 32


@pytest.mark.parametrize("buffer", [Growing, lambda form: Static(60, form)])
@pytest.mark.parametrize("name", ["full", "int8", "int4", "e4m3", "int5", "nvfp4", "rotated"])
@torch.no_grad()
def test_a_cache_says_the_same_with_and_without(name, buffer, fused, monkeypatch):
    """To the bit: both write the same and attend by the same kernel."""
    model = llama()
    say = life(lambda model: kvlab.KVCache(model, store=buffer(FORMS[name])), rows=2)
    found = say(model)
    assert len(fused) > 3 * 35
    monkeypatch.setattr(Fused, "of", lambda *_: None)
    count, expected = len(fused), say(model)
    assert len(fused) == count and all(map(torch.equal, found, expected))


KIVI = {"bits": 4, "group": 5, "recent": 7}


def both(make, held, fused, monkeypatch, pauses=(18, 19)):
    """(What 24 steps say and hold, in one call each; the same without): rows with padding, one that pauses, a
    fork, and on top in the end. make() -> a cache; held(layer) -> tensors of a layer."""
    model, found = llama(), []
    for without in (False, True):
        if without:
            monkeypatch.setattr(Fused, "of", lambda *_: None)
        cache = make(model)
        stepper, count = kvlab.Stepper(model, cache), len(fused)
        ids, mask = left_padded([prompt(33, seed=1), prompt(14, seed=2), prompt(21, seed=3)])
        seen = [stepper.feed(ids, mask, last=True)]
        for step in range(24):
            real = torch.tensor([[1], [1], [step < 18]]) if step in pauses else None
            if step == 12:
                stepper.fork(torch.tensor([2, 0, 0]))
            if step == 21:
                cache.hold()
            seen.append(stepper.feed(prompt(1, 3, seed=step), real, last=True))
            seen += [tensor for layer in cache.layers for tensor in held(layer)]
        found.append(seen)
        assert (len(fused) - count >= 3 * 10) is not without
    return found


@torch.no_grad()
def test_kivi_holds_the_same_with_and_without(fused, monkeypatch):
    def held(layer):
        one = layer.store
        return [*one.window, *one.keys, *one.blocks, *one.values, one.recents_real[:, :, : one.filled]]

    make = lambda model: kvlab.KVCache(model, store=Kivi(**KIVI))
    assert all(map(torch.equal, *both(make, held, fused, monkeypatch, pauses=())))


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), 65536.0])
@pytest.mark.parametrize("side", [0, 1])
def test_kivis_window_takes_only_what_its_blocks_can_hold(side, wrong):
    store = started(Kivi(**KIVI), HEAD, 2)
    store.append(*torch.randn(2, 3, 2, 20, HEAD))
    store.append(*torch.randn(2, 3, 2, 1, HEAD))  # makes room
    both, query = torch.randn(2, 3, 2, 1, HEAD), torch.randn(3, 2, 1, HEAD)
    step, before = Fused.of(store, query), [part.clone() for part in store.window]
    both[side, 1, 1, 0, 17] = wrong
    assert step.call(store, query, *both, 0.2) is None
    assert store.length == 21 and all(map(torch.equal, before, store.window))
    both[side, 1, 1, 0, 17] = 65504.0
    assert step.call(store, query, *both, 0.2) is not None
    assert torch.equal(store.window[side][:, :, -1:], both[side])


def fed(cache, model, mask=None, rows=1):
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(20, rows), mask)
    for step in range(3):
        stepper.feed(prompt(1, rows, seed=step))


def test_what_is_no_such_step_goes_as_before(fused):
    model = llama()
    turned = Sinks(9, renumber=True)
    for answers in (
        {"keep": turned},
        {"store": Int(4, symmetric=False)},
        {"store": Float4(largest="4over6")},
        {"store": Paged(64)},
        {"place": Host()},
    ):
        fed(kvlab.KVCache(model, **answers), model)
    fed(kvlab.make_cache(model, "kivi4"), model)
    ids, mask = left_padded([prompt(20, seed=1), prompt(11, seed=2)])
    for spec in ("int8", "h2o:budget=9"):
        stepper = begun(model, spec, (ids, mask))
        stepper.feed(prompt(1, 2), torch.tensor([[1], [0]]))  # a token that is padding
    watched = kvlab.make_cache(model, "full")
    for layer in watched.layers:
        layer.on_read = lambda *_: None
    fed(watched, model)
    timed = kvlab.make_cache(model, "full")
    with record(model, timed):
        fed(timed, model)
    fed(kvlab.make_cache(tiny("llama"), "full"), tiny("llama"))  # heads of 8
    double = copy.deepcopy(llama()).double()
    fed(kvlab.make_cache(double, "full"), double)
    assert not fused


KEEPS = (
    "h2o:budget=9", "h2o:budget=0.9,recent=0.1", "h2o:budget=0.3,every=7", "tova:budget=9", "sinks:budget=9",
    "snapkv:budget=9,window=3", "keynorm:budget=9,every=3", "expected:budget=9,every=3",
    "kvzip:budget=9,over=head", "full",
)  # fmt: skip


STORES = {"full": lambda: None, "int8": lambda: Int(8), "static": lambda: Static(70)}
PAIRS = [*((spec, [*STORES][i % 3]) for i, spec in enumerate(KEEPS)), *((KEEPS[0], one) for one in STORES)]


@pytest.mark.parametrize("spec, store", dict.fromkeys(PAIRS))
@torch.no_grad()
def test_a_keep_holds_the_same_with_and_without(spec, store, fused, monkeypatch):
    """Positions, numbers held, and logits to the bit; each keep over one of the stores."""

    def make(model):
        keep = kvlab.make_cache(model, spec).layers[0].keep.policy
        return kvlab.KVCache(model, keep=keep, store=STORES[store]())

    def held(layer):
        there = layer.positions >= 0
        return [layer.positions, *(part[there] for part in layer.store.read(torch.device("cpu")))]

    assert all(map(torch.equal, *both(make, held, fused, monkeypatch)))
