"""Blocks, sharing and refusal of the paged store; whatever happens to it: tests/fuzz."""

import pytest
import torch
from tiny import prompt, started, tiny

import kvlab
from kvlab.gather import gather_slots
from kvlab.keep import H2O, PyramidKV, Sinks, SnapKV
from kvlab.store import BlockPool, Paged

CPU = torch.device("cpu")


def rows(batch, tokens, seed, heads=2, width=3):
    return torch.randn(batch, heads, tokens, width, generator=torch.Generator().manual_seed(seed))


def test_forks_share_until_one_writes():
    store, prefix = started(Paged(block=4), 3), rows(1, 10, 1)
    store.append(prefix, prefix)
    store.select_rows(torch.zeros(16, dtype=torch.long))
    assert store.pool.used == 3  # shared once
    new = rows(16, 1, 2)
    store.append(new, new)
    assert store.pool.used == 2 + 16  # two full blocks still shared; each row has an end of its own
    keys, _ = store.read(CPU)
    assert torch.equal(keys, torch.cat([prefix.expand(16, -1, -1, -1), new], 2))
    store.select_rows(torch.tensor([3]))
    assert store.pool.used == 3
    slots = torch.tensor([[[0, 8], [7, 3]]])
    assert torch.equal(store.pick(slots).read(CPU)[0], gather_slots(keys[3:4], slots))


def test_blocks_come_back():
    pool = BlockPool(6, block=4)
    first, second = started(Paged(pool=pool), 3), started(Paged(pool=pool), 3)
    first.append(rows(1, 12, 0), rows(1, 12, 0))
    second.append(rows(1, 9, 1), rows(1, 9, 1))
    assert pool.used == 6
    third = started(Paged(pool=pool), 3)
    with pytest.raises(ValueError, match="1 blocks of 4 tokens are needed and 0 of 6 are free"):
        third.append(rows(1, 1, 2), rows(1, 1, 2))
    assert pool.used == 6 and third.length == 0  # a refusal changes nothing
    del first
    assert pool.used == 3
    third.append(rows(1, 12, 2), rows(1, 12, 2))
    assert torch.equal(second.read(CPU)[0], rows(1, 9, 1))


@pytest.mark.parametrize("keep", [H2O(8), SnapKV(8, window=4), PyramidKV(8, window=4), Sinks(8)])
def test_what_is_evicted_comes_back_before_more_is_asked_for(keep):
    """A pool that holds one layer's prompt and what the others keep is enough, also at every step."""
    model, ids = tiny("llama"), prompt(24, rows=2)  # 3 layers; 6 blocks of 4 a row and layer, 2 of them kept
    whole = kvlab.decode(model, ids, kvlab.KVCache(model, keep=keep), 8)
    cache = kvlab.KVCache(model, keep=keep, store=Paged(blocks=2 * (6 + 2 * 3 + 2), block=4))
    tight = kvlab.decode(model, ids, cache, 8)
    assert torch.equal(tight.logprobs, whole.logprobs)
    cache.reset()
    assert cache.layers[0].store.pool.used == 0
    small = kvlab.KVCache(model, keep=keep, store=Paged(blocks=11, block=4))
    with pytest.raises(ValueError, match="layer 0: paged: 12 blocks of 4 tokens are needed and 11 of 11"):
        kvlab.decode(model, ids, small, 2)


def test_caches_that_share_a_pool():
    model, pool = tiny("llama"), BlockPool(40, block=8)
    caches = [kvlab.KVCache(model, store=Paged(pool=pool)) for _ in range(2)]
    for seed, cache in enumerate(caches):
        trace = kvlab.decode(model, prompt(20, seed=seed), cache, 4)
        full = kvlab.decode(model, prompt(20, seed=seed), kvlab.make_cache(model, "full"), 4)
        assert torch.equal(trace.logprobs, full.logprobs)
    assert pool.used == 2 * 3 * 3
    block = 2 * 2 * 8 * 8 * 4  # K and V, KV heads, tokens, head dimension, fp32
    assert pool.block_bytes == block
    table = caches[0].layers[0].store.table
    assert caches[0].stats().device_bytes == (40 - 3 * 3) * block + 3 * table.nbytes  # without the other's
