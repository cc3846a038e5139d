"""Quest in whole models: crops, the index's bytes, what is missed, rows that leave."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.reference import attention


def stepped(model, spec, ids, steps=6, **given):
    """(stepper, logits of every step)."""
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
    stepper.feed(ids, **given)
    return stepper, [stepper.feed(prompt(1, rows=len(ids), seed=step)) for step in range(steps)]


def test_the_bytes_of_the_index_and_of_what_is_fetched():
    model, heads, width = tiny("llama"), 2, 8
    stepper, _ = stepped(model, "quest:budget=0.3,page=4", prompt(50, rows=3), 1)
    stats = stepper.cache.stats()
    chooses = 2  # of four layers
    assert stats.index_bytes == stats.device_bytes == chooses * 3 * heads * 13 * width * 2 * 4
    token = 2 * width * 4
    wanted = chooses * 3 * heads * 50 * token  # the other two fetch everything
    assert wanted + chooses * 3 * heads * 9 * token <= stats.fetched_bytes
    assert stats.fetched_bytes <= wanted + chooses * 3 * heads * 12 * token  # three pages
    assert stats.moved_bytes == stats.fetched_bytes + 4 * 3 * heads * token
    assert stats.missed_mass is None
    for spec in ("full", "offload"):
        stats = stepped(model, spec, prompt(50), 1)[0].cache.stats()
        assert stats.index_bytes == 0 and stats.missed_mass is None
    assert stats.fetched_bytes == 4 * heads * 50 * token
    partial = stepped(model, "infinigen", prompt(50), 1)[0].cache.stats()
    assert partial.index_bytes == partial.device_bytes > 0


@pytest.mark.parametrize("link", ["", ",link=1e9"])
@pytest.mark.parametrize(
    "spec", ["quest:budget=9,page=2", "topk:budget=5", "infinigen:budget=5", "quest+int8:page=2"]
)
def test_missed_mass_is_what_attention_gives_to_the_rest(spec, link):
    model = tiny("llama")
    ids, mask = left_padded([prompt(30), prompt(23, seed=1)])
    read = {}

    def on_read(layer, held, slots, query):
        if slots is not None:
            read[layer.index] = slots, query, layer.given.keys

    cache = kvlab.make_cache(model, f"{spec},missed=true{link}")
    for layer in cache.layers:
        layer.on_read = on_read
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids, mask)
    assert cache.stats().missed_mass is None
    for step in range(3):
        stepper.feed(prompt(1, rows=2, seed=step))
    expected = []
    for index, (slots, query, newest) in read.items():
        layer = cache.layers[index]
        layer.place.commit(layer)
        keys = layer.store.read(torch.device("cpu"))[0]
        keys[:, :, -1:] = newest
        for row in range(2):
            for head in range(4):
                there = (layer.positions[row, head // 2] >= 0).nonzero()[:, 0].tolist()
                weights = attention.weights(query[row, head, 0], keys[row, head // 2, there], 8**-0.5)
                taken = set(slots[row, head // 2].tolist())
                expected.append(float(sum(w for w, s in zip(weights, there, strict=True) if s not in taken)))
    assert cache.stats().missed_mass == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert cache.stats().missed_mass > 0.01
    stepper.feed(prompt(5, rows=2))  # no choice was made
    assert cache.stats().missed_mass is None
