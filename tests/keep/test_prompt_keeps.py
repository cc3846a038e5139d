"""SnapKV, TOVA and PyramidKV against their definitions, written again one head and one token at a time."""

import math

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.keep import TOVA, PyramidKV, SnapKV
from kvlab.place import Device
from kvlab.place.device import DeviceState


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


def weights(layer, row, pad, head, at, over):
    """Softmax weights of the query at position `at` over the positions `over`, mean over the group."""
    queries, keys = (
        torch.cat(layer.place.queries, 2)[row, :, pad:],
        torch.cat(layer.place.keys, 2)[row, head, pad:],
    )
    group = queries.shape[0] // layer.kv_heads
    total = torch.zeros(len(over))
    for member in range(head * group, (head + 1) * group):
        scores = [float(queries[member, at] @ keys[position]) * layer.scaling for position in over]
        total += torch.tensor(scores).softmax(0) / group
    return total.tolist()


def snap(layer, row, pad, head, size, budget, window, kernel):
    votes = [0.0] * size
    for at in range(max(0, size - window), size):
        for position, weight in enumerate(weights(layer, row, pad, head, at, range(at + 1))):
            votes[position] += weight
    reach = kernel // 2
    pooled = [max(votes[max(0, p - reach) : p + reach + 1]) for p in range(size)]
    recent = list(range(size - min(window, budget, size), size))
    rest = sorted(range(max(0, size - window)), key=lambda p: (-pooled[p], p))
    return sorted([*recent, *rest[: budget - len(recent)]]) if size > budget else list(range(size))


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
    shares = [2 - 1 / 4, 2 - 1 / 4 - 0.5, 2 - 1 / 4 - 1.0, 1 / 4]  # on a line from 1.75 to 0.25
    for step, layer in run(tiny("llama"), PyramidKV(0.4, window, 3, beta=4), sizes, 2):
        for row, size in enumerate(sizes):
            budget = min(size, max(window, math.floor(int(0.4 * size) * shares[layer.index] + 1e-6)))
            for head in range(layer.kv_heads):
                expected = snap(layer, row, 40 - size, head, size, budget, window, 3)
                assert held(layer, row, head) == [*expected, *range(size, size + step)]
    assert sum(shares) == 4


def test_tova():
    sizes, budget = (24, 11), 8
    lists = {}
    for step, layer in run(tiny("llama"), TOVA(budget), sizes, 5):
        for row, size in enumerate(sizes):
            now = size + step - 1
            before = lists.get((layer.index, row), list(range(size - 1)))
            every = [*before, now]
            parts = [weights(layer, row, 24 - size, head, now, every) for head in range(layer.kv_heads)]
            mean = [sum(part) for part in zip(*parts, strict=True)]
            ranked = sorted(range(len(before)), key=lambda i: -mean[i])
            lists[layer.index, row] = sorted([*(before[i] for i in ranked[: budget - 1]), now])
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
