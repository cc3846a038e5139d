"""Skewing, folding and choosing slots; what TopK and InfiniGen fetch is compared in tests/reference."""

import copy
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import begun, prompt, tiny

import kvlab
from kvlab.attention import recorded
from kvlab.calibrate import skew as skewing
from kvlab.calibrate.fold import fold, is_folded
from kvlab.calibrate.skew import skewing_matrices
from kvlab.models.remembered import Remembered
from kvlab.place.topk import most_important


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=3), heads=st.integers(1, 3),
    slots=st.integers(1, 9), kinds=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_most_important_slots_of_every_row_and_head(counts, heads, slots, kinds, seed):
    """Of equal ones, any."""
    generator = torch.Generator().manual_seed(seed)
    importance = torch.randint(kinds, (len(counts), heads, slots), generator=generator).float().log()
    found = most_important(importance, counts)
    assert found.there == int((found >= 0).sum())
    assert found.shape == (len(counts), heads, min(max(counts), slots))
    for row, count in enumerate(counts):
        for head in range(heads):
            chosen = [slot for slot in found[row, head].tolist() if slot >= 0]
            assert len(set(chosen)) == len(chosen) == min(count, slots)
            best = sorted(importance[row, head].tolist(), reverse=True)[: len(chosen)]
            assert sorted(importance[row, head, chosen].tolist(), reverse=True) == best


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_folding_changes_no_logit_and_saves_the_rotation(family, tmp_path):
    unfolded = tiny(family, num_hidden_layers=3, initializer_range=0.3)
    folded = fold(kvlab.prepare(copy.deepcopy(unfolded)))
    ids = prompt(25, rows=2)
    with torch.no_grad():
        assert torch.allclose(folded(ids).logits, unfolded(ids).logits, atol=1e-4)
    spec = "infinigen:budget=0.4,alpha=1.0,full_layers=1"
    rotated = kvlab.decode(unfolded, ids, kvlab.make_cache(unfolded, spec), 8)
    ready = kvlab.decode(folded, ids, kvlab.make_cache(folded, spec), 8)
    assert torch.equal(rotated.tokens, ready.tokens)  # the same selections
    assert torch.allclose(rotated.logprobs, ready.logprobs, atol=1e-4)
    folded.save_pretrained(tmp_path)
    loaded = kvlab.prepare(type(unfolded).from_pretrained(tmp_path).eval())
    assert is_folded(loaded) and not is_folded(unfolded)
    again = kvlab.decode(loaded, ids, kvlab.make_cache(loaded, spec), 8)
    assert torch.equal(again.logprobs, ready.logprobs)
    assert kvlab.make_cache(loaded, spec).layers[2].place.fetch.skew is None  # nothing to rotate
    gathered = [sum(strongest_quarter(model, ids)) for model in (unfolded, folded)]
    assert gathered[1] > gathered[0]
    with pytest.raises(ValueError, match="folded already"):
        fold(loaded)


def test_a_damaged_file_of_skewing_matrices_is_made_again(monkeypatch, tmp_path):
    """A flipped bit, half of it, a folder or a pipe in its place; a whole one is read."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(skewing, "SMALL", 0)
    model, draw = tiny("llama"), random.Random(3)

    def found():
        monkeypatch.setattr(skewing, "_skews", Remembered())
        return skewing.skew(model)

    made = found()
    (file,) = (tmp_path / "skew").iterdir()
    whole = file.read_bytes()
    for damage in ("none", "a bit", "a bit", "half", "a folder", "a pipe"):
        file.unlink()
        if damage == "a folder":
            file.mkdir()
        elif damage == "a pipe":
            os.mkfifo(file)
        else:
            now = bytearray(whole[: len(whole) // 2] if damage == "half" else whole)
            now[draw.randrange(len(now))] ^= (damage == "a bit") << draw.randrange(8)
            file.write_bytes(now)
        with monkeypatch.context() as patch:
            if damage == "none":
                patch.setattr(skewing, "_calibrate", None)
            assert all(map(torch.equal, found(), made))
        if damage == "a folder":
            file.rmdir()
            file.touch()


def strongest_quarter(model, ids):
    """Part of each layer's query energy in its strongest quarter of columns."""
    for layer in recorded(kvlab.prepare(model), ids[:1]):
        queries = layer.query[0].unflatten(0, (layer.keys.shape[1], -1)).flatten(1, 2)
        energy = queries.square().sum(1)
        yield float(energy.topk(2).values.sum() / energy.sum())


def test_only_models_without_rotation_are_folded():
    with pytest.raises(ValueError, match="'llama' cannot be folded, only opt and gpt2"):
        fold(tiny("llama"))


def test_a_gpus_skewing_matrices_are_made_on_the_cpu(monkeypatch):
    """In fp32 it parts from a CPU where singular values lie close, and other tokens are chosen."""
    plain, seen = torch.Tensor.cpu, []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: seen.append(self) or plain(self))
    skewing_matrices(torch.randn(2, 40, 8))
    assert len(seen) == 1


CHOSEN = {  # what becomes of slots [batch, kv_heads, n]
    "of another head": lambda x, slots: x + slots,
    "the newest": lambda x, slots: x.clamp(min=slots - 1),
    "below none": lambda x, slots: x - x - 2,
    "twice": lambda x, slots: torch.cat([x, x], -1),
    "one row": lambda x, slots: x[:0],
    "no heads": lambda x, slots: x[:, 0],
    "floats": lambda x, slots: x.float(),
    "a list": lambda x, slots: x.tolist(),
    "without numbers": lambda x, slots: x.to("meta"),
}


@pytest.mark.parametrize("link", [None, kvlab.place.ModelledLink(1e9)])
@pytest.mark.parametrize("base", [kvlab.place.TopK, kvlab.place.InfiniGen])
@pytest.mark.parametrize("wrong", CHOSEN)
def test_a_fetch_of_ones_own_that_chooses_nonsense(wrong, base, link):
    def spoilt(choose):
        def chosen(self, layer, query):
            slots = choose(self, layer, query)
            return slots if slots is None or layer.lengths[0] < 14 else CHOSEN[wrong](slots, layer.slots)

        return chosen

    own = type("Own", (base,), {n: spoilt(getattr(base, n)) for n in ("select", "speculate")})
    model = tiny("llama")
    stepper = begun(model, {"place": kvlab.place.Host(own(0.4), link)}, prompt(12, rows=2))
    with pytest.raises(ValueError, match=r"^Own, layer \d: expected slots to fetch, [^\n]*$"):
        for step in range(4):
            stepper.feed(prompt(1, 2, step))


def test_a_step_that_fetches_nothing_attends_to_itself():
    model, said = tiny("llama"), []
    for none in (lambda x: x[..., :0], lambda x: torch.full_like(x, -1), lambda x: x.fill_(-1)):

        class Nothing(kvlab.place.TopK):
            def select(self, layer, query):
                return none(super().select(layer, query))  # noqa: B023

        stepper = begun(model, {"place": kvlab.place.Host(Nothing())}, prompt(12))
        said.append(stepper.feed(prompt(1)))
    for other in said[1:]:
        torch.testing.assert_close(other, said[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("link", [None, kvlab.place.ModelledLink(1e9)])
def test_a_guess_of_ones_own_is_asked_for(link):
    """Before each step, once the model's blocks have run."""
    asked = []

    class Guess(kvlab.place.Fetch):
        speculates = True

        def speculate(self, layer, query):
            asked.append((layer.index, tuple(query().shape)))

    model = tiny("llama")
    begun(model, {"place": kvlab.place.Host(Guess(), link)}, prompt(12, 2), prompt(1, 2), prompt(1, 2))
    config = model.config
    shape = 2, config.num_attention_heads, 1, config.hidden_size // config.num_attention_heads
    assert asked == [(layer, shape) for layer in range(1, config.num_hidden_layers)] * 2


@pytest.mark.parametrize("wrong", ["policy", "resident"])
def test_a_fetch_of_ones_own_with_another_state_or_no_share(wrong):
    class Own(kvlab.place.TopK):
        def start(self, layer):
            state = super().start(layer)
            state.policy = state.policy if wrong == "resident" else range(3)
            return state

        def resident(self, layer):
            return range(3)

    with pytest.raises(ValueError, match=r"^(Own\.start|resident=range\(0, 3\)): expected [^\n]*$"):
        cache = kvlab.KVCache(tiny("llama"), place=kvlab.place.Host(Own()))
        kvlab.Stepper(tiny("llama"), cache).feed(prompt(12))
        cache.stats()


class Sketch(kvlab.place.Fetch):
    """Remembers a part of every key."""

    per_slot, make = ("sketch",), None

    def prefill(self, layer, query, keys):
        layer.state.sketch = type(self).make(keys[..., :4].clone())

    def append(self, layer, keys):
        layer.state.sketch = torch.cat([layer.state.sketch, keys[..., :4]], 2)


@pytest.mark.parametrize("wrong", ["one row", "one head too many", "one too many", "a number", "not at all"])
def test_what_a_fetch_of_ones_own_remembers_is_looked_at(wrong):
    made = {
        "one row": lambda x: x[:1],
        "one head too many": lambda x: torch.cat([x, x[:, :1]], 1),
        "one too many": lambda x: torch.cat([x, x[:, :, :1]], 2),
        "a number": lambda x: 3.0,
        "not at all": lambda x: x,
    }
    own = type("Own", (Sketch,), {"make": staticmethod(made[wrong])})
    cache = kvlab.KVCache(tiny("llama"), place=kvlab.place.Host(own()))
    stepper = kvlab.Stepper(tiny("llama"), cache)
    if wrong == "not at all":
        stepper.feed(prompt(12, 2))
        stepper.feed(prompt(1, 2))
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-1)
        assert cache.layers[0].place.fetch.sketch.shape[2] == 12
    else:
        with pytest.raises(ValueError, match=r"^Own, layer 0: sketch [^\n]*\[batch, kv_heads, slots\] is "):
            stepper.feed(prompt(12, 2))


def test_a_link_of_ones_own_is_a_link():
    def decoded(**own):
        kind = type("Own", (kvlab.place.ModelledLink,), own)
        place = kvlab.place.Host(kvlab.place.TopK(0.3), kind(1e9))
        kvlab.decode(tiny("llama"), prompt(12), kvlab.KVCache(tiny("llama"), place=place), 3)

    decoded()
    with pytest.raises(TypeError, match=r"^Own\.__init__ does not call that of Link$"):
        decoded(__init__=lambda self, speed: None)
    with pytest.raises(ValueError, match=r"^Own, layer 0: ZeroDivisionError[^\n]*$"):
        decoded(write=lambda self, *given, **named: 1 / 0)
    with pytest.raises(TypeError, match="expected a Link"):
        kvlab.place.Host(link=type("Duck", (), {"fetch": print})())


class Extends(Sketch):
    """Learns of several tokens at once, and of single ones when it chooses."""

    make = staticmethod(lambda x: x)

    def append(self, layer, keys):
        pass

    def extend(self, layer, query, keys):
        layer.state.sketch = keys[..., :4].clone()

    def select(self, layer, query):
        missing = layer.store.read("cpu")[0][:, :, layer.state.sketch.shape[2] :, :4]
        layer.state.sketch = torch.cat([layer.state.sketch, missing], 2)
        return None


def test_a_fetch_may_learn_of_new_tokens_when_it_chooses():
    model, ids = tiny("llama"), prompt(40)
    cache = kvlab.KVCache(model, place=kvlab.place.Host(Extends()))
    stepper, full = (kvlab.Stepper(model, one) for one in (cache, kvlab.KVCache(model)))
    for piece in (ids[:, :20], ids[:, 20:], prompt(1), prompt(5), prompt(1)):
        assert torch.allclose(stepper.feed(piece), full.feed(piece), atol=1e-4)


class Newest(kvlab.place.Fetch):
    """Needs nothing of the prompt."""

    learns = False

    def select(self, layer, query):
        past = layer.slots - 1
        slots = torch.arange(max(0, past - 8), past)
        return slots.expand(len(layer.lengths), layer.kv_heads, -1).clone()


@pytest.mark.parametrize("piece", [13, 20, 39])
def test_a_fetch_that_learns_nothing_chooses_in_no_piece_of_a_prompt(piece):
    model, ids = tiny("llama"), prompt(40)

    def run(**how):
        cache = kvlab.KVCache(model, place=kvlab.place.Host(Newest()))
        out = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False, pad_token_id=0,
                             return_dict_in_generate=True, output_logits=True, **how)  # fmt: skip
        return torch.stack(out.logits)

    assert torch.allclose(run(), run(prefill_chunk_size=piece), atol=1e-4)
