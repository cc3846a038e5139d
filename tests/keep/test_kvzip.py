"""KVzip: what is read again, what comes of it, and that nothing else does."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from families.models import family
from reference.test_models import held_by_head
from tiny import begun, left_padded, prompt, tiny

import kvlab
from kvlab.keep import KVzip

SIZES = (47, 9, 30)


@dataclass(frozen=True)
class Watched(KVzip):
    """Compares what is held before the prompt is read again with what is held when it has been."""

    seen = []

    def held(self, layer):
        tensors = [*layer.store.parts()[0], *layer.store.parts()[1], layer.slot_positions]
        return [tensor.clone() for tensor in tensors], layer.rows_held, layer.lengths

    def again(self, layer, model, ids, real):
        cache = layer._layer.cache()
        Watched.seen[:] = [self.held(one) for one in cache.attending]
        yield from super().again(layer, model, ids, real)

    def agree(self, layers):
        for layer, (tensors, *counts) in zip(layers, Watched.seen, strict=True):
            after, *counts_after = self.held(layer)
            assert counts == counts_after
            assert all(torch.equal(one, other) for one, other in zip(tensors, after, strict=True))
        Watched.seen.append("compared")
        super().agree(layers)


@pytest.mark.parametrize("store", [None, kvlab.store.Ragged(kvlab.store.Int(4))])
@pytest.mark.parametrize("chunk, calls", [(2000, 1), (16, 3), (20, 3), (24, 2)])
def test_one_pass_for_every_chunk_and_nothing_is_written(store, chunk, calls):
    model, fed = tiny("llama"), []
    ids, mask = left_padded([prompt(size, seed=size) for size in SIZES])
    cache = kvlab.KVCache(model, keep=Watched(0.4, chunk=chunk), store=store)
    note = lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1])
    with model.register_forward_pre_hook(note, with_kwargs=True):
        kvlab.Stepper(model, cache).feed(ids, mask)
    assert Watched.seen.pop() == "compared"
    assert len(fed) == 1 + calls and fed[0] == 47
    assert fed[1] == min(chunk, 47) and all(tokens <= chunk + 8 for tokens in fed[1:])
    assert cache.get_seq_length() == 47
    assert all(layer.keep.scores is layer.keep.ids is layer.keep.real is None for layer in cache.layers)


def numbered(model, cache, ids, mask):
    model(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)


def by_its_body(model, cache, ids, mask):
    model.model(input_ids=ids, attention_mask=mask, past_key_values=cache)


def forked_amid(model, cache, ids, mask):
    stepper = kvlab.Stepper(model, cache)
    with cache.prefill():
        stepper.feed(ids[[2, 0, 1], :20], mask[[2, 0, 1], :20])
        stepper.fork(torch.tensor([1, 2, 0]))
        stepper.feed(ids[:, 20:], mask[:, 20:])


@pytest.mark.parametrize(
    "way",
    [numbered, by_its_body, forked_amid],
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("window", [None, 11])
@torch.no_grad()
def test_whoever_feeds_the_prompt(way, window):
    model = tiny("mistral", sliding_window=window)
    ids, mask = left_padded([prompt(size, seed=size) for size in SIZES])
    one, other = (kvlab.make_cache(model, "kvzip:budget=0.4,chunk=16") for _ in range(2))
    kvlab.Stepper(model, one).feed(ids, mask)
    way(model, other, ids, mask)
    assert one.stats().tokens_held < (window or 47)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(mine.positions, theirs.positions)


def test_the_budget_is_met_over_all_layers_and_heads():
    model, ids = tiny("llama"), prompt(60)
    held = {}
    for over in ("model", "layer", "head"):
        cache = begun(model, f"kvzip:budget=0.25,over={over}", ids).cache
        held[over] = [[len(one) for (index, _), one in held_by_head(cache, 0).items() if index == layer.order]
                      for layer in cache.layers]  # fmt: skip
        assert sum(map(sum, held[over])) == 15 * 2 * 3
    assert held["head"] == [[15, 15]] * 3
    assert all(sum(layer) == 30 for layer in held["layer"]) and held["layer"] != held["head"]
    assert any(sum(layer) != 30 for layer in held["model"])


@pytest.mark.parametrize("at", range(3))
def test_a_prompt_in_pieces_whose_second_reading_breaks_off_is_broken(at, tmp_path):
    model = tiny("llama")
    cache = kvlab.make_cache(model, "kvzip:budget=0.5")
    for piece in prompt(30).split(17, dim=1):
        model(piece, past_key_values=cache)
    calls = count()

    def interrupt(*_):
        if next(calls) == at:
            raise KeyboardInterrupt

    with model.model.layers[2].register_forward_pre_hook(interrupt), suppress(KeyboardInterrupt):
        cache.stats()
    if next(calls) <= at:  # fewer passes
        return
    for use in (lambda: cache.save(tmp_path / "c"), lambda: model(prompt(1), past_key_values=cache)):
        with pytest.raises(RuntimeError, match=r"broke off: start again with cache.reset\(\)"):
            use()
    cache.reset()
    fresh = kvlab.make_cache(model, "kvzip:budget=0.5")
    for one in (cache, fresh):
        kvlab.Stepper(model, one).feed(prompt(30))
    assert held_by_head(cache, 0) == held_by_head(fresh, 0)


def test_what_cannot_be_read_again():
    model = tiny("llama")
    for name in ("DeepSeek-V3", "LFM2", "Qwen3-Next", "Falcon-H1"):
        with pytest.raises(ValueError, match="KVzip reads the prompt again, for which the model must hold"):
            kvlab.make_cache(kvlab.prepare(family(name)), "kvzip")
        kvlab.make_cache(kvlab.prepare(family(name)), "kvzip:budget=1")  # nothing is read again
    cache = kvlab.make_cache(model, "kvzip")
    with pytest.raises(ValueError, match="it needs its token ids: give input_ids"), torch.no_grad():
        model(inputs_embeds=torch.randn(1, 9, 32), past_key_values=cache)
    with pytest.raises(ValueError, match=r"a prompt of 120 tokens leaves no room to be read again .* of 128"):
        kvlab.Stepper(model, cache).feed(prompt(120))


def test_where_the_tokenizer_is_known_an_instruction_comes_first():
    model, tokenizer = kvlab.load()
    fed, ids = (
        [],
        tokenizer("Once there was a small boat on a wide lake. " * 4, return_tensors="pt").input_ids,
    )
    note = lambda module, args, kwargs: fed.append(tokenizer.decode(kwargs["input_ids"][0]))
    with model.register_forward_pre_hook(note, with_kwargs=True):
        kvlab.Stepper(model, kvlab.make_cache(model, "kvzip:chunk=24")).feed(ids)
    text = tokenizer.decode(ids[0])
    assert fed[0] == text and text.startswith(tokenizer.decode(ids[0, :24]))
    assert fed[1] == "\n\nRepeat the previous context exactly.\n" + tokenizer.decode(ids[0, :24])
    later = "\n\nRepeat the part of the previous context exactly, starting with"
    assert fed[2] == later + tokenizer.decode(ids[0, 16:24]) + "\n" + tokenizer.decode(ids[0, 24:48])


def test_a_window_that_holds_less_than_the_budget_leaves_it_to_others():
    """Layers with a window and layers without one: no layer is asked for more than it holds."""
    model = kvlab.prepare(family("Gemma 3"))
    ids = torch.randint(2, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    cache = kvlab.KVCache(model, keep=KVzip(20))
    kvlab.Stepper(model, cache).feed(ids)
    held = held_by_head(cache, 0)
    full = [layer for layer in cache.attending if layer.local is None]
    assert full and len(full) < len(cache.attending)
    heads = model.config.num_key_value_heads
    most = sum(heads * min(20, layer.local - 1 if layer.local else 20) for layer in cache.attending)
    assert sum(map(len, held.values())) == most


def test_a_short_context_is_read_in_shorter_chunks():
    model, fed = tiny("llama"), []  # a context of 128
    note = lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1])
    with model.register_forward_pre_hook(note, with_kwargs=True):
        kvlab.Stepper(model, kvlab.make_cache(model, "kvzip:budget=0.3")).feed(prompt(100))
    assert fed == [100, 20, 28, 28, 28, 28]
