"""The link: what it carries, in which order, and what it costs."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import linked, prompt, tiny

import kvlab
from kvlab.measure.machines import like, link_named
from kvlab.place import Host, Link, ModelledLink, TopK, Whole
from kvlab.store import Growing

PAIRS = [  # the same system with a link and without
    ("offload", "full"),
    ("offload+int4", "int4"),
    ("offload+h2o:budget=0.4", "h2o:budget=0.4"),
    ("uvm", "full"),
    ("uvm+h2o:budget=0.4", "h2o:budget=0.4"),
    ("topk:budget=0.3", "topk:budget=0.3"),
    ("infinigen:budget=0.4,alpha=0.5", "infinigen:budget=0.4,alpha=0.5"),
]


@pytest.mark.parametrize("spec, same", PAIRS)
def test_a_link_works_in_inference_mode(spec, same):
    """As the harness decodes: the link's threads know nothing of the mode of who asks; nor after it."""
    model, ids = tiny("llama"), prompt(23)
    here = kvlab.decode(model, ids, kvlab.make_cache(model, same), 4)
    cache = kvlab.make_cache(model, linked(spec))
    for mode in (True, False):
        with torch.inference_mode(mode):
            there = kvlab.decode(model, ids, cache, 4)
            assert torch.equal(here.tokens, there.tokens)
            cache.reset()


@pytest.mark.parametrize("spec", ["offload", "offload+int4", "topk:budget=7", "infinigen:budget=7,alpha=inf"])
def test_records_add_up_to_the_bytes_moved(spec):
    """And these are what the same method counts without a link."""
    model = tiny("llama")
    cache, unlinked = kvlab.make_cache(model, linked(spec)), kvlab.make_cache(model, spec)
    trace = kvlab.decode(model, prompt(30, rows=2), cache, 4)
    assert trace.moved_bytes == kvlab.decode(model, prompt(30, rows=2), unlinked, 4).moved_bytes
    records = cache.layers[0].place.link.records
    written = [r for r in records if r.why == "write"]
    # all but what is ahead of the next step
    fetched = [r for r in records if r.why != "write" and r.future is None]
    assert sum(r.bytes for r in (*written, *fetched)) == sum(trace.moved_bytes)
    assert [r.layer for r in written] == list(range(4)) * 4  # the prompt and three steps
    assert {r.toward for r in written} == {"host"} and {r.toward for r in fetched} == {"device"}


def test_unified_memory_faults_for_what_does_not_fit():
    model = tiny("llama")
    trace = kvlab.decode(model, prompt(50), kvlab.make_cache(model, "uvm"), 5)
    assert all(trace.moved_bytes)
    trace = kvlab.decode(model, prompt(50), kvlab.make_cache(model, "uvm:memory=60"), 5)
    assert trace.moved_bytes[1] > 0 and trace.moved_bytes[2:] == [0, 0, 0]  # touched once, then there
    cache = kvlab.make_cache(model, "uvm+h2o:link=1e9")
    trace = kvlab.decode(model, prompt(50), cache, 5)
    assert trace.moved_bytes[2:] == [0, 0, 0] and trace.tokens_held[-1] == 10
    fetch = [r for r in cache.layers[0].place.link.records if r.why == "fetch"]
    assert [r.layer for r in fetch] == [0, 1, 2, 3]


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


def test_bad_links():
    model = tiny("llama")
    for bad in ({"latency": -1}, {"latency": float("inf")}, {"page": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            ModelledLink(1e9, **bad)
    with pytest.raises(ValueError, match="machine='A100'"):
        like("A100", model)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="a CudaLink needs a CUDA device"):
            link_named("cuda", model)
    assert link_named(None, model) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec, same", PAIRS)
def test_a_cuda_link_changes_no_number(spec, same):
    model = tiny("llama", dtype=torch.float64).to("cuda")
    ids = prompt(23, rows=2).to("cuda")
    here = kvlab.decode(model, ids, kvlab.make_cache(model, same), 8)
    there = kvlab.decode(model, ids, kvlab.make_cache(model, linked(spec, "cuda")), 8)
    assert torch.equal(here.tokens, there.tokens)
    model.cpu()


def test_links_are_shared_by_layers_and_end_with_their_cache():
    before = set(threading.enumerate())
    model = tiny("llama")
    cache = kvlab.make_cache(model, "offload:link=1e9")
    assert len({id(layer.place.link) for layer in cache.layers}) == 1
    kvlab.decode(model, prompt(9), cache, 3)
    workers = [worker for worker in set(threading.enumerate()) - before if worker.name.startswith("link-")]
    assert len(workers) == 2
    del cache
    for _ in range(300):  # a worker may still hold the transfer that it has just finished, and so the link
        gc.collect()
        for worker in workers:
            worker.join(timeout=0.1)
        if not any(worker.is_alive() for worker in workers):
            break
    else:
        raise AssertionError("the link's workers outlive the cache")
    link = Link()
    kvlab.decode(model, prompt(9), kvlab.KVCache(model, place=Host(Whole(), link)), 3)
    assert link.records
