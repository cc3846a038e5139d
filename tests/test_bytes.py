"""What a cache holds, in bytes and tokens: every tensor is counted, and nothing is held that need not be."""

import gc
import random
import weakref

import pytest
import torch
from every import EVERY, make
from families.models import family
from tiny import begun, prompt, tiny

import kvlab
from kvlab.policy import State


def storages(value, seen):
    """Every tensor storage reachable from an object, found by walking it: the independent count."""
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for item in value.values():
            storages(item, seen)
    elif isinstance(value, tuple | list):
        for item in value:
            storages(item, seen)
    elif hasattr(value, "__dict__"):
        shared = value.shared if isinstance(value, State) else ()  # the model's own tensors
        storages({name: item for name, item in vars(value).items() if name not in shared}, seen)
    return seen


@pytest.mark.parametrize("spec", [one for one in EVERY if make(tiny("llama"), one).layers[0].place.on_host])
def test_bytes_that_cross_are_those_of_a_batch_s_rows(spec):
    """In a pass that some rows have more tokens in than others, padding is no token."""
    model, seed = tiny("llama"), random.randrange(10**6)
    ids, count = prompt(11, 2, seed=seed), random.Random(seed).randint(2, 6)
    more, mask = prompt(6, 2, seed=seed + 1), torch.ones(2, 6, dtype=torch.long)
    mask[0, :-count] = 0
    stats = []
    for rows, new in ((ids, (more, mask)), (ids[:1], (more[:1, -count:],)), (ids[1:], (more[1:],))):
        stepper = kvlab.Stepper(model, make(model, spec))
        stepper.feed(rows)
        stepper.feed(*new)
        stats.append(stepper.cache.stats())
    for name in ("fetched_bytes", "moved_bytes"):
        found = [getattr(one, name) for one in stats]
        assert found[0] == found[1] + found[2], f"{name} of {count} and 6 tokens, seed {seed}"


@pytest.mark.parametrize("spec", [*EVERY, "padded"])
def test_stats_add_up_to_the_storages_really_allocated_which_are_freed_with_the_cache(spec):
    """Freed not when Python's collector comes by: it counts objects, and these are few and large."""
    model, ids = tiny("llama"), prompt(20, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    kvlab.decode(model, ids, make(model, spec), 3)  # what is made once for a model stays
    gc.disable()
    try:
        cache = make(model, spec)
        kvlab.decode(model, ids, cache, 6, attention_mask=mask)
        for forgotten in (False, True):  # a pool stays
            if forgotten:
                cache.reset()
            seen = {}
            for layer in getattr(cache, "attending", ()):
                storages({name: value for name, value in vars(layer).items() if name != "padding"}, seen)
            stats = cache.stats()
            held = stats.device_bytes + stats.host_bytes + stats.spare_bytes
            assert spec == "padded" or held == sum(seen.values()) > (-1 if forgotten else 0)
        left, layer = weakref.ref(cache), None
        del cache
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("spec", ["full", "int4", "fp8"])
def test_room_is_counted_bounded_and_seldom_made(spec):
    """What is reserved beside the tokens held is said, is at most an eighth or 16 slots, and a long text is
    copied about nine times in all: not once per step, as by concatenation."""
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), spec)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(20, rows=2))
    assert cache.stats().spare_bytes == 0, "the prompt fills its buffer"
    store = cache.layers[0].store
    slot = 3 * 2 * 2 * store.bytes_per_slot  # layers, rows, heads
    rooms, most = set(), 0
    for step in range(100):
        stepper.feed(prompt(1, rows=2, seed=step))
        spare = cache.stats().spare_bytes
        most = max(most, spare)
        assert spare == slot * (store.keys[0].shape[2] - (21 + step))
        rooms.add(store.keys[0].shape[2])
    assert most == slot * 16 and cache.stats().device_bytes == slot * 120
    assert store.copies == 20 + 37 + 54 + 71 + 88 + 105 < sum(range(20, 120)) / 9 and len(rooms) == 6
    forked = cache.layers[0].store
    stepper.fork(torch.tensor([0]))
    assert forked.keys[0].shape[2] == 120 and cache.stats().spare_bytes == 0


@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("last", [None, 1, 13, 200])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_a_long_prompt_is_watched_in_blocks_that_stay_in_a_cache(heads, last, threads, monkeypatch):
    """With what it says of short ones, and room for a block's weights, used again."""
    from kvlab import attention
    from kvlab.visibility import CAUSAL

    monkeypatch.setattr(attention, "WATCHED_BLOCK", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = 8 * min(4, threads)  # queries of a block
    sizes, original = [], torch.softmax

    def softmax(x, *args, out=None):
        sizes.append((x.shape, out.untyped_storage().nbytes()))
        return original(x, *args, out=out)

    monkeypatch.setattr(torch, "softmax", softmax)
    query, keys, values = (torch.randn(2, count, 61, 16) for count in (heads[0], heads[1], heads[1]))
    given = attention.Recorded(query, keys, values, CAUSAL, 0.3)
    expected = *given.attend(True, last), given.received(last)
    assert not sizes
    monkeypatch.setattr(attention, "LONG", 60)
    found = *given.attend(True, last), given.received(last)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * (1 + theirs.abs().max())
    group = heads[0] // heads[1]
    assert sizes and max(x[0] for x, _ in sizes) <= rows * group and all(x[1] <= 61 for x, _ in sizes)
    assert {room for _, room in sizes} == {4 * rows * group * 61}


KEEPS = (
    "keynorm:",
    "keydiff:",
    "random:",
    "h2o:",
    "snapkv:",
    "adakv:of=keydiff,",
    "pyramidkv:window=2,",
    "kvzip:",
)


@pytest.mark.parametrize("seed", range(14))
def test_tokens_held_is_what_rows_hold_in_the_mean_of_heads_and_the_fullest_layer(seed):
    """A window, too, leaves heads different numbers."""
    dice = random.Random(seed)
    model = kvlab.prepare(family(dice.choice(["Llama", "Mistral", "Gemma 3", "Llama 4"])))
    spec = f"{KEEPS[seed % len(KEEPS)]}budget={dice.choice([0.4, 5])}"
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
    for tokens in (dice.randint(9, 40), *[1] * 9):
        stepper.feed(prompt(tokens, 2, seed))
        layers = stepper.cache.attending
        counts = [(layer.slot_positions >= 0).sum(-1).double().mean(-1) for layer in layers]
        assert stepper.cache.stats().tokens_held == round(float(torch.stack(counts).mean(0).amax()))


def test_resident_pages_of_unified_memory_are_device_bytes():
    model = tiny("llama")
    for memory, share in ((1000, 1.0), (0.5, 0.5), (25, 0.5), (0, 0.0)):
        for link in ("", ",link=1e10"):
            stepper = begun(model, f"uvm:memory={memory}{link}", prompt(50, 2))
            cache = stepper.cache
            cache.stats()
            stepper.feed(prompt(1, 2))
            found, per_token = (
                cache.stats(),
                2 * 2 * 2 * 8 * 4 * 3,
            )  # rows, K and V, heads, numbers, bytes, layers
            staged = sum(x.nbytes for x in cache.layers[0].place.link.staging.buffers) if link else 0
            assert found.host_bytes + found.device_bytes - staged == 51 * per_token
            assert abs(found.device_bytes - staged - share * 51 * per_token) <= 0.02 * 51 * per_token


def test_room_for_partial_keys_to_come_is_spare():
    model = tiny("llama")
    stepper = begun(model, "infinigen:budget=0.5,full_layers=1", prompt(40))
    cache = stepper.cache
    tight = cache.stats()
    assert tight.spare_bytes == 0
    stepper.feed(prompt(1))
    found = cache.stats()
    partial = [layer.place.fetch.partial for layer in cache.layers[1:]]
    assert all(one.spare_bytes for one in partial)
    assert found.index_bytes - tight.index_bytes == sum(one.keys[0][:, :, 0].nbytes for one in partial)
    assert found.spare_bytes == sum(one.spare_bytes for one in (*partial, *(x.store for x in cache.layers)))


def test_lengths_that_transformers_sees():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "sinks:budget=6")
    kvlab.Stepper(model, cache).feed(prompt(20))
    assert cache.get_seq_length() == 20  # logical
    assert cache.layers[0].get_mask_sizes(1) == (7, 14)  # physical: held + query, seen - held
    assert cache.get_max_length() == -1
    assert kvlab.make_cache(model, "static:length=50").get_max_length() == 50


def test_no_step_holds_a_matrix_of_all_weights(monkeypatch):
    """H2O's statistics come from blocks of queries: no product of scores is larger than a block."""
    from kvlab import attention

    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    sizes = []
    original = torch.Tensor.softmax

    def softmax(self, *args, **kwargs):
        sizes.append(self.shape)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "softmax", softmax)
    model = tiny("llama")
    kvlab.decode(model, prompt(100), kvlab.make_cache(model, "h2o"), 1)
    assert sizes and max(shape[-2] for shape in sizes) <= 2 * 16  # group of 2 query heads
