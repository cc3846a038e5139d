"""Quest in whole models: crops, the index's bytes, what is missed, rows that leave."""

import pytest
import torch
from reference.definitions import attention
from tiny import left_padded, prompt, tiny

import kvlab


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
