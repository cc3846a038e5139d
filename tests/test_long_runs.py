"""Long runs: only the tokens held grow, and everything is given back."""

import copy
import gc
import threading
import time

import pytest
import torch
from every import EVERY, LINKED, PROFILED, make
from tiny import EACH, prompt, tiny

import kvlab


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


@pytest.fixture(scope="module")
def living():
    """Call it: (objects born since this file's tests began, bytes of the tensors among them)."""
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
            time.sleep(0.001)  # what links have under way, and threads that end
        return last

    yield count
    gc.unfreeze()


@pytest.mark.parametrize("spec", [*EACH, *PROFILED, *LINKED, "paged:block=4"])
def test_a_long_run_is_flat_and_gives_everything_back(spec, living, monkeypatch):
    """After each reset as much lives as after the one before; after `del` nothing of the cache, no thread."""
    monkeypatch.setattr("kvlab.link.base.RECORDS", 50)
    model, threads = tiny("llama"), threading.active_count()
    kvlab.decode(model, prompt(12), make(model, spec), 2)  # what a model makes once: skewing matrices, hooks
    before = living()
    cache, found = make(model, spec), []
    for _ in range(3):
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
