"""The link: what it carries, in which order, and what it costs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import linked, prompt, tiny

import kvlab
from kvlab.place import Host, ModelledLink, TopK, Whole
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec, same", PAIRS)
def test_a_cuda_link_changes_no_number(spec, same):
    model = tiny("llama", dtype=torch.float64).to("cuda")
    ids = prompt(23, rows=2).to("cuda")
    here = kvlab.decode(model, ids, kvlab.make_cache(model, same), 8)
    there = kvlab.decode(model, ids, kvlab.make_cache(model, linked(spec, "cuda")), 8)
    assert torch.equal(here.tokens, there.tokens)
    model.cpu()
