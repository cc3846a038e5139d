"""SnapKV, TOVA and PyramidKV in whole models against their definitions, one head and one token at a time."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.keep import TOVA, PyramidKV, SnapKV
from kvlab.place import Device
from kvlab.place.device import DeviceState
from kvlab.reference import attention, keep


class Asked(Device):
    """Notes the queries and keys of the prompt and of every step."""

    def start(self, layer):
        return AskedState(self)


class AskedState(DeviceState):
    shared = ("queries", "keys")

    def prefill(self, layer, query, keys):
        self.queries, self.keys = [query], [keys]

    def append(self, layer, keys):
        self.keys.append(keys)

    def read(self, layer, query):
        self.queries.append(query)
        return super().read(layer, query)


def run(model, keep, sizes, steps):
    """Feed a padded batch and `steps` tokens; yields (step, layer) after every pass."""
    cache = kvlab.KVCache(model, keep=keep, place=Asked())
    ids, mask = left_padded([prompt(size, seed=size) for size in sizes])
    stepper = kvlab.Stepper(model, cache)
    for step in range(steps + 1):
        stepper.feed(ids, mask) if step == 0 else stepper.feed(prompt(1, rows=len(sizes), seed=step))
        for layer in cache.layers:
            yield step, layer


def held(layer, row, head):
    return [p for p in layer.positions[row, head].tolist() if p >= 0]


def asked(layer, row, pad, head):
    """Queries `[group, tokens, head_dim]` and keys `[tokens, head_dim]` of a KV head, padding left out."""
    queries, keys = (torch.cat(parts, 2)[row, :, pad:] for parts in (layer.place.queries, layer.place.keys))
    group = queries.shape[0] // layer.kv_heads
    return queries[head * group : (head + 1) * group], keys[head]


def snap(layer, row, pad, head, size, budget, window, kernel):
    queries, keys = asked(layer, row, pad, head)
    votes = attention.received(queries[:, :size], keys[:size], layer.scaling, size - window)
    return keep.snapkv(votes.tolist(), budget, window, kernel)


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("budget, window, kernel", [(0.4, 4, 3), (9, 4, 5), (6, 8, 1)])
def test_snapkv(family, budget, window, kernel):
    sizes = (31, 13)
    for step, layer in run(tiny(family), SnapKV(budget, window, kernel), sizes, 3):
        for row, size in enumerate(sizes):
            count = budget if budget > 1 else int(budget * size)
            for head in range(layer.kv_heads):
                expected = snap(layer, row, 31 - size, head, size, count, window, kernel)
                assert held(layer, row, head) == [*expected, *range(size, size + step)]


def test_pyramidkv_gives_lower_layers_more():
    sizes, window = (40, 21), 3
    for step, layer in run(tiny("llama"), PyramidKV(0.4, window, 3, beta=4), sizes, 2):
        for row, size in enumerate(sizes):
            budget = keep.pyramid(int(0.4 * size), layer.index, 4, window, size, beta=4)
            for head in range(layer.kv_heads):
                expected = snap(layer, row, 40 - size, head, size, budget, window, 3)
                assert held(layer, row, head) == [*expected, *range(size, size + step)]
    assert [keep.pyramid(16, layer, 4, window, 40, 4) for layer in range(4)] == [28, 20, 12, 4]


def test_tova():
    sizes, budget = (24, 11), 8
    lists = {}
    for step, layer in run(tiny("llama"), TOVA(budget), sizes, 5):
        for row, size in enumerate(sizes):
            now = size + step - 1
            before = lists.get((layer.index, row), list(range(size - 1)))
            every, mean = [*before, now], 0
            for head in range(layer.kv_heads):
                queries, keys = asked(layer, row, 24 - size, head)
                mean = mean + attention.group_weights(queries[:, now], keys[every], layer.scaling)
            given = dict(zip(every, mean.tolist(), strict=True))
            lists[layer.index, row] = keep.tova(given, budget)
            for head in range(layer.kv_heads):
                assert held(layer, row, head) == lists[layer.index, row]


def test_bad_parameters():
    for make, says in [
        (lambda: SnapKV(window=0), "window=0"),
        (lambda: SnapKV(kernel=4), "kernel=4: expected an odd"),
        (lambda: PyramidKV(beta=0.5), "beta=0.5"),
        (lambda: TOVA(0), "budget=0"),
    ]:
        with pytest.raises(ValueError, match=says):
            make()
