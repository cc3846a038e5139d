"""Two threads in one cache: one of them is right, the other is refused in one line, whatever they do."""

import copy
import gc
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import begun, prompt, tiny

import kvlab
from kvlab.models.passes import Hook

SPECS = [
    "full",
    "h2o:budget=12",
    "int8",
    "kivi2:group=4,recent=6",
    "offload:link=1e9",
    "paged:block=4",
    "kvzip:budget=8",
]


def at_once(model, cache, others):
    """What `others(cache)` raise in another thread while a step is in the middle of the model."""
    said = []

    def meet(*args):
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            said.extend(pool.submit(do, cache).exception() for do in others)

    hook = model.model.layers[1].register_forward_pre_hook(meet)
    with torch.no_grad():
        model(prompt(1), past_key_values=cache)
    return said


def in_threads(count, run):
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("spec", SPECS)
def test_another_thread_is_refused_in_the_middle_of_a_pass(spec):
    model = copy.deepcopy(tiny("llama"))
    cache, alone = (kvlab.make_cache(model, spec) for _ in range(2))
    others = [
        lambda cache: model(prompt(1), past_key_values=cache), lambda cache: cache.stats(), copy.deepcopy,
        lambda cache: cache.reorder_cache(torch.tensor([0])), lambda cache: cache.crop(-1),
        lambda cache: cache.reset(), lambda cache: cache.hold(), lambda cache: cache.save("/nowhere/at/all"),
        lambda cache: cache.layers[0].keys, lambda cache: cache.layers[2].values,
    ]  # fmt: skip
    with torch.no_grad():
        for one in (cache, alone):
            model(prompt(20), past_key_values=one)
        for _ in range(3):
            said = at_once(model, cache, random.Random(spec).sample(others, 8))
            for error in said:
                about = str(error)
                assert isinstance(error, RuntimeError | ValueError) and "\n" not in about
                assert "another thread" in about or "evicted" in about
            model(prompt(1), past_key_values=alone)
        want, got = (model(prompt(1), past_key_values=one).logits for one in (alone, cache))
    assert torch.equal(want, got) and not cache.broken
    assert cache.stats().tokens_seen == 24


def test_a_thread_that_is_gone_leaves_nobody_waiting():
    model = copy.deepcopy(tiny("llama"))
    cache = kvlab.make_cache(model, "full")

    def breaks():
        with model.register_forward_pre_hook(lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
            model(prompt(9), past_key_values=cache)

    thread = threading.Thread(target=breaks)
    thread.start()
    thread.join()
    assert kvlab.decode(model, prompt(9), cache, 2)


@pytest.mark.parametrize("spec", ["full", "infinigen:budget=8", "kvzip:budget=8"])
def test_threads_make_the_first_caches_of_a_model_at_once(spec):
    """A model is prepared once, and tokens of other threads are none of a layer's trial."""
    for seed in range(6):
        model, found, start = copy.deepcopy(tiny("llama")), [], threading.Barrier(4)

        def make(model=model, found=found, start=start, seed=seed):
            start.wait()
            try:
                found.append(
                    kvlab.decode(model, prompt(20, seed=seed), kvlab.make_cache(model, spec), 4).tokens
                )
            except BaseException as error:
                found.append(error)

        in_threads(4, make)
        alone = kvlab.decode(model, prompt(20, seed=seed), kvlab.make_cache(model, spec), 4).tokens
        assert all(torch.equal(one, alone) for one in found), found
        hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
        assert sum(isinstance(hook, Hook) for hook in hooks) == 2


@pytest.mark.parametrize("block", [1, 16])
def test_copies_of_a_paged_cache_share_a_pool_in_several_threads(block):
    """It grows, and blocks change hands, while other threads write."""
    model, ids, before = tiny("llama"), prompt(12), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def answers(cache, seed):
        with torch.no_grad():
            steps = [model(prompt(1, seed=seed + step), past_key_values=cache).logits for step in range(8)]
        return torch.cat(steps)

    try:
        for _ in range(2):
            held = {spec: kvlab.make_cache(model, spec) for spec in ("full", f"paged:block={block}")}
            for cache in held.values():
                kvlab.Stepper(model, cache).feed(ids)
                cache.hold()
            plain, paged = ([copy.deepcopy(cache) for _ in range(4)] for cache in held.values())
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(answers, paged, range(4)))
            for seed, cache in enumerate(plain):
                assert torch.allclose(found[seed], answers(cache, seed), atol=1e-4)
            pool = held[f"paged:block={block}"].layers[0].store.pool
            del paged, cache
            gc.collect()
            assert pool.used == len(pool.counts) - pool.counts.count(0)
            assert len({*pool.free}) == len(pool.free)
    finally:
        sys.setswitchinterval(before)


def test_padded_in_several_threads():
    """Copies share an engine; in one cache the second thread is refused."""
    model = tiny("llama", num_hidden_layers=2)
    first = begun(model, "padded:length=40", prompt(12))

    def answers(stepper, seed):
        return torch.cat([stepper.feed(prompt(1, seed=seed + step), last=True) for step in range(8)])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(answers, [first.copied() for _ in range(12)], range(12)))
    assert all(torch.equal(found[seed], answers(first.copied(), seed)) for seed in range(12))

    feed, said = first.cache.engine.feed, []

    def meet(*given):
        if threading.current_thread() is threading.main_thread():
            for use in (lambda: first.cache.forward(prompt(1)), lambda: copy.deepcopy(first.cache)):
                with ThreadPoolExecutor(1) as pool:
                    said.append(pool.submit(use).exception())
        return feed(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first.cache.engine, "feed", meet)
        first.feed(prompt(1))
    assert all("another thread is in a pass" in str(error) for error in said) and len(said) == 2
    assert not first.cache.broken
