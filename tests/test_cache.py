"""What a cache promises whatever its policies: bytes, lengths, forks, beams, crop, reset."""

import copy
import gc
import io
import pickle
import threading
import time

import pytest
import torch
from tiny import EACH, prompt, tiny

import kvlab
from kvlab.keep import H2O, Sinks
from kvlab.place import Host, InfiniGen, ModelledLink, TopK
from kvlab.policy import State
from kvlab.store import Float8, Growing, Int, Kivi, Paged, Roomy, Smoothed, Static

CACHED = [spec for spec in kvlab.FIRST_WAVE if spec != "recompute"]
COMPOSED = {
    "h2o in int2 with zero points": lambda: {"keep": H2O(0.4), "store": Int(2, 4, symmetric=False)},
    "sinks in static int4 per channel": lambda: {
        "keep": Sinks(0.4),
        "store": Static(40, Int(4, axis="channel")),
    },
    "fp8 with a scale, paged": lambda: {"store": Paged(format=Float8(axis="tensor"))},
    "int4 per channel on the host, topk": lambda: {
        "store": Roomy(Int(4, axis="channel", symmetric=False)),
        "place": Host(TopK(0.5), ModelledLink(1e9)),
    },
    "kivi2": lambda: {"store": Kivi(2, group=4, recent=6)},
    "h2o in smoothed int4 with exact sinks": lambda: {
        "keep": H2O(0.4),
        "store": Static(40, Smoothed(Int(4)), Int(4), sinks=3),
    },
    "h2o in int4": lambda: {"keep": H2O(0.4), "store": Int(4, group=8)},
    "h2o in a static buffer": lambda: {"keep": H2O(0.4), "store": Static(40)},
    "sinks in static int8": lambda: {"keep": Sinks(0.4), "store": Static(40, Int(8))},
    "fp8 on the host": lambda: {"store": Growing(Float8("e5m2")), "place": Host()},
    "int4 on the host, topk": lambda: {"store": Int(4), "place": Host(TopK(0.5))},
    "infinigen over h2o": lambda: {"keep": H2O(0.6), "place": Host(InfiniGen(0.5, full_layers=1))},
}


def make(model, spec):
    if spec in COMPOSED:
        return kvlab.KVCache(model, **COMPOSED[spec]())
    return kvlab.make_cache(model, spec)


LINKED = [
    "infinigen:budget=0.5,pool=12,link=1e9",
    "offload:link=1e9",
    "offload+int4:link=1e9",
    "offload+h2o:budget=0.4,link=1e9",
    "uvm:link=1e9",
    "uvm+h2o:budget=0.4,link=1e9",
    "topk:budget=0.5,link=1e9",
    "infinigen:budget=0.5,link=1e9",
]
EVERY = [spec for spec in dict.fromkeys([*CACHED, *EACH, *COMPOSED, *LINKED]) if spec != "recompute"]


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


@pytest.mark.parametrize("spec", EVERY)
def test_stats_add_up_to_the_storages_really_allocated(spec):
    model, cache = tiny("llama"), make(tiny("llama"), spec)
    ids = prompt(20, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    kvlab.decode(model, ids, cache, 6, attention_mask=mask)
    seen = {}
    for layer in cache.layers:
        storages({name: value for name, value in vars(layer).items() if name != "padding"}, seen)
    stats = cache.stats()
    assert stats.device_bytes + stats.host_bytes == sum(seen.values()) > 0


def test_bytes_are_those_of_the_formulas():
    # 4 layers, 2 KV heads of 8 (group = 8), 3 rows, 20 + 5 tokens held; K and V
    model, values = tiny("llama"), 2 * 4 * 2 * 3 * 25
    expected = {
        "full": values * 8 * 4,
        "static": values * 8 * 4 * 128 // 25,
        "int8": values * (8 + 2),
        "int4": values * (4 + 2),
        "int4:group=4": values * (4 + 4),
        "fp8": values * 8,
    }
    for spec, expected_bytes in expected.items():
        cache = kvlab.make_cache(model, spec)
        kvlab.decode(model, prompt(20, rows=3), cache, 6)
        assert cache.stats().device_bytes == expected_bytes, spec
        assert cache.stats().host_bytes == cache.stats().moved_bytes == 0


def test_int4_holds_less_than_a_third_of_fp16():
    model = tiny("llama", hidden_size=128)  # head dimension 32, as in the workshop model
    cache = kvlab.make_cache(model, "int4")
    kvlab.decode(model, prompt(40), cache, 2)
    assert cache.stats().device_bytes <= 0.33 * 2 * 4 * 2 * 32 * 41 * 2


def test_evicted_tokens_leave_memory():
    model = tiny("llama")
    for spec in ("sinks:budget=10", "h2o:budget=10"):
        cache = kvlab.make_cache(model, spec)
        trace = kvlab.decode(model, prompt(60), cache, 20)
        assert trace.tokens_held == [10] * 20
        assert len(set(trace.device_bytes[1:])) == 1  # constant
        keys, _ = cache.layers[0].store.read(torch.device("cpu"))
        assert keys.shape == (1, 2, 10, 8)
        assert keys.untyped_storage().nbytes() == keys.nbytes
        assert cache.layers[0].positions.shape == (1, 2, 10)
        assert cache.get_seq_length() == 79


def test_moved_bytes():
    model = tiny("llama")
    slot = 2 * 8 * 4  # K and V of one head
    cache = kvlab.KVCache(model, place=Host())
    trace = kvlab.decode(model, prompt(30, rows=2), cache, 3)
    per_token = 2 * 2 * 4 * slot  # rows, KV heads, layers
    assert trace.moved_bytes == [30 * per_token, 31 * per_token, 32 * per_token]  # all, back and forth
    cache = kvlab.make_cache(model, "topk:budget=7")
    trace = kvlab.decode(model, prompt(30, rows=2), cache, 3)
    assert trace.moved_bytes == [30 * per_token, 8 * per_token, 8 * per_token]  # 7 fetched, 1 written
    assert cache.stats().device_bytes == 0
    cache = kvlab.make_cache(model, "infinigen:budget=7,alpha=inf")
    trace = kvlab.decode(model, prompt(30, rows=2), cache, 2)
    assert trace.moved_bytes[1] == (31 * 2 + 8 * 2) * per_token // 4  # two full layers, two that choose


@pytest.mark.parametrize("spec", EVERY)
def test_fork_equals_separate_prompts(spec):
    model, ids = tiny("llama"), prompt(18, rows=2)
    follow = prompt(3, rows=4, seed=5)
    rows = torch.tensor([0, 1, 0, 1])
    forked = kvlab.Stepper(model, make(model, spec))
    forked.feed(ids)
    forked.fork(rows)
    apart = kvlab.Stepper(model, make(model, spec))
    apart.feed(ids[rows])
    for step in range(3):
        token = follow[:, step : step + 1]
        assert torch.allclose(forked.feed(token), apart.feed(token), atol=1e-4)
    assert torch.equal(forked.cache.layers[1].positions, apart.cache.layers[1].positions)


def test_fork_of_recompute():
    model, ids = tiny("llama"), prompt(9)
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "recompute"))
    stepper.feed(ids)
    stepper.fork(torch.zeros(2, dtype=torch.long))
    both = stepper.feed(prompt(1, rows=2, seed=3))
    full = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    full.feed(ids.expand(2, -1))
    assert torch.allclose(both, full.feed(prompt(1, rows=2, seed=3)), atol=1e-5)


@pytest.mark.parametrize("spec", EVERY)
def test_beam_search(spec):
    model, ids = tiny("gpt2"), prompt(18, rows=2)
    settings = {
        "max_new_tokens": 6,
        "num_beams": 3,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    out = model.generate(ids, past_key_values=make(model, spec), **settings)
    assert out.shape == (2, 24)
    if spec in ("full", "static"):
        assert torch.equal(out, tiny("gpt2", "sdpa").generate(ids, **settings))


def test_batch_helpers_of_transformers():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "h2o")
    kvlab.Stepper(model, cache).feed(prompt(12, rows=2))
    kept = cache.layers[0].positions
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].positions, kept.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([3]))
    assert torch.equal(cache.layers[0].positions, kept[1:])


@pytest.mark.parametrize("spec", EVERY)
def test_crop_forgets_or_refuses(spec):
    model, ids = tiny("llama"), prompt(20, rows=2)
    cache = make(model, spec)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids)
    before = stepper.feed(prompt(1, rows=2, seed=8))
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(0)
    if cache.layers[0].keep.policy.evicts:
        with pytest.raises(ValueError, match="evicted"):
            cache.crop(-1)
        return
    cache.crop(-1)
    assert cache.get_seq_length() == 20
    stepper.ids, stepper.mask = stepper.ids[:, :-1], stepper.mask[:, :-1]
    again = stepper.feed(prompt(1, rows=2, seed=8))
    assert torch.allclose(again, before, atol=1e-5)


def test_crop_with_padding_and_to_nothing():
    model, ids = tiny("llama"), prompt(10, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = kvlab.make_cache(model, "full")
    kvlab.Stepper(model, cache).feed(ids, mask)
    cache.crop(-2)
    assert cache.layers[0].positions[:, 0].tolist() == [[*range(8)], [-1] * 4 + [*range(4)]]
    assert cache.layers[0].lengths == [8, 4]
    cache.crop(-50)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("spec", EVERY)
def test_reset_starts_over(spec):
    model, ids = tiny("llama"), prompt(16, rows=2)
    cache = make(model, spec)
    first = kvlab.decode(model, ids, cache, 5)
    with pytest.raises(ValueError, match="already holds tokens"):
        kvlab.decode(model, ids, cache, 5)
    cache.reset()
    assert cache.stats().device_bytes == cache.stats().host_bytes == cache.get_seq_length() == 0
    second = kvlab.decode(model, ids[:1], cache, 5)
    assert torch.equal(first.tokens[:1], second.tokens)


def test_positions_speak_of_the_rows_own_tokens():
    model = tiny("llama")
    ids, mask = prompt(8, rows=2), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    cache = kvlab.make_cache(model, "full")
    kvlab.Stepper(model, cache).feed(ids, mask)
    positions = cache.layers[2].positions
    assert positions.dtype == torch.long and positions.shape == (2, 2, 8)
    assert positions[0, 1].tolist() == [-1, -1, -1, 0, 1, 2, 3, 4]
    assert positions[1, 0].tolist() == list(range(8))


def test_lengths_that_transformers_sees():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "sinks:budget=6")
    kvlab.Stepper(model, cache).feed(prompt(20))
    assert cache.get_seq_length() == 20  # logical
    assert cache.get_mask_sizes(1, 0) == (7, 14)  # physical: held + query, seen - held
    assert cache.get_max_length() == -1
    assert kvlab.make_cache(model, "static:length=50").get_max_length() == 50


def test_caches_do_not_share_state_with_their_policies_or_each_other():
    model, keep = tiny("llama"), H2O(0.5)
    one, two = kvlab.KVCache(model, keep=keep), kvlab.KVCache(model, keep=keep)
    kvlab.decode(model, prompt(12), one, 4)
    assert one.layers[0].keep.policy is two.layers[0].keep.policy is keep
    assert two.layers[0].keep.limits is None and two.get_seq_length() == 0
    clone = copy.deepcopy(one)
    clone.reset()
    assert one.get_seq_length() == 15


@pytest.mark.parametrize("spec", [*EVERY, "recompute"])
@pytest.mark.parametrize("moment", ["empty", "prompt", "two steps", "half a prompt"])
def test_a_deep_copy_and_its_original_go_on_independently(spec, moment):
    """Both as if alone: the copy with other tokens, while the original waits, and the other way round."""
    model, ids = tiny("llama"), prompt(17, rows=2)

    def until(cache):
        stepper = kvlab.Stepper(model, cache)
        if moment == "half a prompt":
            with cache.prefill():
                stepper.feed(ids[:, :11])
                return stepper, copy.deepcopy(cache)
        if moment != "empty":
            stepper.feed(ids)
        if moment == "two steps":
            for seed in range(2):
                stepper.feed(prompt(1, rows=2, seed=seed))
        return stepper, copy.deepcopy(cache)

    def go_on(stepper, seed):
        first = {"empty": ids, "half a prompt": ids[:, 11:]}.get(moment, ids[:, :1])
        return [stepper.feed(x) for x in (first, *prompt(3, rows=2, seed=seed).split(1, 1))]

    stepper, twin = until(make(model, spec))
    other = kvlab.Stepper(model, twin)
    other.ids, other.mask = stepper.ids, stepper.mask
    if moment == "half a prompt":
        stepper.cache.reset()  # the block has ended with the half: only the copy may go on as one prompt
        alone = kvlab.Stepper(model, make(model, spec))
        with alone.cache.prefill():
            alone.feed(ids[:, :11])
            alone.feed(ids[:, 11:])
        found = [go_on(other, 3)[1:]]
        expected = [[alone.feed(x) for x in prompt(3, rows=2, seed=3).split(1, 1)]]
    else:
        mine = [stepper.feed(x) for x in ([ids] if moment == "empty" else [ids[:, :1]])]
        theirs = go_on(other, 3)
        mine += [stepper.feed(x) for x in prompt(3, rows=2, seed=4).split(1, 1)]
        found, expected = [theirs, mine], []
        for seed in (3, 4):
            expected.append(go_on(until(make(model, spec))[0], seed))
    for ours, right in zip(found, expected, strict=True):
        for one, two in zip(ours, right, strict=True):
            assert torch.allclose(one, two, atol=1e-5)


def test_a_prefix_is_read_once_and_continued_twice():
    """The recipe of transformers: fill a cache with the prefix, and hand `generate` a deep copy."""
    model, prefix = tiny("llama"), prompt(20)
    for spec in ("full", "static", "offload:link=1e9", "h2o:budget=9", "infinigen:link=1e9", "paged"):
        cache = make(model, spec)
        with torch.no_grad():
            model(prefix, past_key_values=cache)
        for seed in (1, 2):
            ids = torch.cat([prefix, prompt(5, seed=seed)], 1)
            settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            found = model.generate(ids, past_key_values=copy.deepcopy(cache), **settings)
            if spec in ("full", "static", "offload:link=1e9", "paged"):
                assert torch.equal(found, tiny("llama", "sdpa").generate(ids, **settings)), spec
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("spec", ["full", "offload:link=1e9", "paged", "recompute"])
def test_pickling_is_refused_in_one_line(spec):
    cache = make(tiny("llama"), spec)
    for copied in (pickle.dumps, copy.copy, lambda cache: torch.save(cache, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled: copy.deepcopy\(cache\) copies it") as error:
            copied(cache)
        assert "\n" not in str(error.value)


def test_a_cache_remembers_no_computation():
    """Without `no_grad` a pass builds a graph; no part of it stays in the cache, which can be copied."""
    model, ids = tiny("llama"), prompt(20)
    for spec in EVERY:
        cache = make(model, spec)
        for part in (ids, ids[:, :1], ids[:, :1]):
            model(part, past_key_values=cache)
        held = [tensor for layer in cache.layers for _, tensor in layer.tensors()]
        assert not any(tensor.requires_grad for tensor in held), spec
        model(ids[:, :1], past_key_values=copy.deepcopy(cache))


@pytest.fixture
def living():
    """Call it: (objects that have come to live since the test began, bytes of the tensors among them)."""
    gc.collect()
    gc.freeze()

    def now() -> tuple[int, int]:
        gc.collect()
        born = gc.get_objects()
        storages = [item.untyped_storage() for item in born if type(item) is torch.Tensor]
        return len(born), sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    def count() -> tuple[int, int]:
        last, until = None, time.time() + 5
        while last != (last := now()) and time.time() < until:
            time.sleep(0.01)  # what links have under way, and threads that end
        return last

    yield count
    gc.unfreeze()


@pytest.mark.parametrize("spec", [*EVERY, "recompute"])
def test_a_long_run_is_flat_and_gives_everything_back(spec, living, monkeypatch):
    """After each reset as much lives as after the one before; after `del` nothing of the cache, no thread."""
    monkeypatch.setattr("kvlab.link.base.RECORDS", 50)
    model, threads = tiny("llama"), threading.active_count()
    kvlab.decode(model, prompt(12), make(model, spec), 2)  # what a model makes once: skewing matrices, hooks
    before = living()
    cache, found = make(model, spec), []
    for _ in range(4):
        kvlab.decode(model, prompt(12, rows=2), cache, 9)
        cache.reset()
        found.append(living())
    few = 60  # of the records of a link, which come from threads; two runs have 80 passes through layers
    assert abs(found[-1][0] - found[1][0]) <= few and found[-1][1] == found[1][1]
    del cache
    after = living()
    assert abs(after[0] - before[0]) <= few and after[1] == before[1]
    until = time.time() + 5
    while threading.active_count() > threads and time.time() < until:
        time.sleep(0.01)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("spec", [*CACHED, *EACH, "paged:block=4", *LINKED[:3]])
def test_steps_are_flat(spec, living, monkeypatch):
    """Only the tokens held grow: ninety steps leave no object more than ten do, and no byte but theirs."""
    monkeypatch.setattr("kvlab.link.base.RECORDS", 20)
    model, cache = tiny("llama"), make(tiny("llama"), spec)
    stepper, found = kvlab.Stepper(model, cache), []
    stepper.feed(prompt(12))
    for step in range(27):
        stepper.feed(prompt(1, seed=step))
        if step in (8, 26):
            stats = cache.stats()
            count, size = living()
            found.append((count, size - stats.device_bytes - stats.host_bytes - 2 * stepper.ids.nbytes))
    assert abs(found[1][0] - found[0][0]) <= 80 and found[1][1] == found[0][1]


def test_no_step_holds_a_matrix_of_all_weights(monkeypatch):
    """H2O's statistics come from blocks of queries: no product of scores is larger than a block."""
    from kvlab import attention

    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    sizes = []
    plain = torch.Tensor.softmax

    def softmax(self, *args, **kwargs):
        sizes.append(self.shape)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "softmax", softmax)
    model = tiny("llama")
    kvlab.decode(model, prompt(100), kvlab.make_cache(model, "h2o"), 1)
    assert sizes and max(shape[-2] for shape in sizes) <= 2 * 16  # group of 2 query heads


def test_static_copies_nothing():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "static")
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(10))
    address = [layer.store.keys[0].data_ptr() for layer in cache.layers]
    before = cache.layers[0].store.keys[0][:, :, :10].clone()
    for step in range(5):
        stepper.feed(prompt(1, seed=step))
    assert [layer.store.keys[0].data_ptr() for layer in cache.layers] == address
    assert torch.equal(cache.layers[0].store.keys[0][:, :, :10], before)


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3"])
def test_a_stats_record_can_be_read_by_name(family):
    model, cache = tiny(family), kvlab.make_cache(tiny(family), "full")
    kvlab.decode(model, prompt(4), cache, 1)
    stats = cache.stats()
    assert stats["tokens_seen"] == stats.tokens_seen == stats.tokens_held == 4
    assert dict(stats)["device_bytes"] == stats.device_bytes
