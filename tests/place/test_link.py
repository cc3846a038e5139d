"""The link: what it carries, in which order, and what it costs."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.link.staging import Staging
from kvlab.place import Host, ModelledLink, TopK, Whole
from kvlab.store import Growing


def test_unified_memory_faults_for_what_does_not_fit():
    """When it is read, layer by layer, and never ahead of that."""
    cache = kvlab.make_cache(tiny("llama"), "uvm+h2o:link=1e9")
    kvlab.decode(cache.model, prompt(50), cache, 5)
    records = [r for r in cache.layers[0].place.link.records if r.toward == "device"]
    assert [(r.why, r.layer) for r in records] == [("fetch", 0), ("fetch", 1), ("fetch", 2)]


@pytest.mark.parametrize("fetch", [Whole(), TopK(0.4)])
def test_two_threads_may_share_a_link(fetch):
    """Each has a cache of its own, and gets the numbers that it gets alone, again and again."""
    model, link = tiny("llama"), ModelledLink(1e9, latency=1e-5)

    def run(seed: int, carrier) -> torch.Tensor:
        cache, found = kvlab.KVCache(model, store=Growing(), place=Host(fetch, carrier)), []
        for turn in range(4):
            ids = prompt(11 + 5 * seed, rows=1 + seed % 2, seed=seed + turn)
            found.append(kvlab.decode(model, ids, cache, 8).logprobs)
            cache.reset()
        return torch.cat([part.flatten() for part in found])

    alone = [run(seed, ModelledLink(1e9)) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda seed: run(seed, link), range(3)))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    assert {record.toward for record in link.records} == {"device", "host"}


def test_lanes_serve_in_order_and_never_faster_than_the_link():
    link = ModelledLink(1e9, latency=1e-3)
    parts = (torch.arange(2 * 3 * 50 * 4.0).view(2, 3, 50, 4),)
    handles = [link.fetch(parts, None, layer=i, bytes=parts[0].nbytes, why="fetch") for i in range(4)]
    back = link.write(parts, layer=9, bytes=parts[0].nbytes, why="write")
    for handle in handles:
        (got,) = handle.wait()
        assert torch.equal(got[:, :, :50], parts[0]) and got.shape == (2, 3, 51, 4)
    assert torch.equal(back.wait()[0], parts[0])
    for early, late in pairwise(handles):
        assert late.started >= early.finished
    for handle in (*handles, back):
        assert handle.submitted <= handle.started
        assert handle.finished - handle.started >= link.seconds(parts[0].nbytes) - 1e-9


def test_staging_is_used_again_and_never_twice_at_once():
    staging = Staging()
    first = staging.take([(2, 3), (5,)], [torch.float32, torch.uint8])
    second = staging.take([(2, 3), (5,)], [torch.float32, torch.uint8])
    assert first[0].shape == (2, 3) and first[1].dtype == torch.uint8
    assert first[0].data_ptr() != second[0].data_ptr() and len(staging.buffers) == 2
    first[0].fill_(1.0)
    second[0].fill_(2.0), second[1].fill_(7)
    assert (first[0] == 1).all()
    where = first[0].data_ptr()
    staging.give_back(first)
    again = staging.take([(2, 3)], [torch.float32])
    assert again[0].data_ptr() == where and len(staging.buffers) == 2
    staging.give_back(again)
    staging.take([(100, 100)], [torch.float64])
    assert len(staging.buffers) == 2  # the small free one made place
    staging.clear()
    assert staging.buffers == ()


def test_what_is_remembered_of_transfers_is_bounded_and_holds_no_tensor(monkeypatch):
    monkeypatch.setattr("kvlab.link.base.RECORDS", 30)
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "offload:link=1e9")
    kvlab.decode(model, prompt(20), cache, 20)
    cache.reset()
    link = cache.layers[0].place.link
    link.drain()
    assert len(link.records) == 30 and all(record.future is None for record in link.records)
