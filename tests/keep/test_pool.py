"""The pool in whole models, and under pressure for two thousand steps; its definition: tests/reference."""

import math

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.attention import Recorded, attend
from kvlab.keep import Pool
from kvlab.place import Fetch, Host, ModelledLink
from kvlab.store import Growing
from kvlab.visibility import CAUSAL


class Random(Fetch):
    """Fetches `count` slots at random, each head its own."""

    def __init__(self, count, seed=0):
        self.count, self.generator = count, torch.Generator().manual_seed(seed)

    def select(self, layer, query):
        past = layer.slots - 1
        shape = (query.shape[0], layer.kv_heads, past)
        noise = torch.rand(shape, generator=self.generator)
        if layer.some_empty is not None:
            noise = noise.masked_fill(layer.some_empty[..., :past] < 0, -1)
        slots = noise.topk(min(self.count, past), dim=-1).indices
        return slots.masked_fill(noise.gather(2, slots) < 0, -1)


def reads_of(cache) -> dict[int, torch.Tensor]:
    """{layer: original positions of what the last step read}, kept up to date."""
    found = {}

    def note(layer, held, slots, query):
        found[layer.index] = layer.slot_positions if slots is None else layer.table.gathered(slots)

    for layer in cache.layers:
        layer.on_read = note
    return found


def test_policies_differ_and_a_full_pool_loses_nothing():
    model, ids = tiny("llama"), prompt(40)
    outputs = {}
    for policy in ("fifo", "lru", "counter"):
        spec = f"infinigen:budget=6,alpha=inf,full_layers=0,pool=30,victim={policy}"
        outputs[policy] = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 25)
    assert len({tuple(trace.logprobs[0].tolist()) for trace in outputs.values()}) == 3
    assert outputs["fifo"].tokens_held == [30] * 25
    large = kvlab.decode(model, ids, kvlab.make_cache(model, "infinigen:pool=64"), 25)
    unlimited = kvlab.decode(model, ids, kvlab.make_cache(model, "infinigen"), 25)
    assert torch.equal(large.logprobs, unlimited.logprobs)


def test_a_capacity_in_bytes():
    model = tiny("llama")
    token = 4 * 2 * 2 * 8 * 4  # K and V of 4 layers, 2 heads of 8
    cache = kvlab.KVCache(model, keep=Pool(3 * 20 * token, unit="bytes"), place=Host())
    trace = kvlab.decode(model, prompt(30, rows=3), cache, 5)
    assert trace.tokens_held == [20] * 5
    assert trace.host_bytes[-1] <= 3 * 20 * token
    with pytest.raises(ValueError, match="expected room for two tokens, 1024 bytes"):
        kvlab.decode(model, prompt(30), kvlab.KVCache(model, keep=Pool(1000, unit="bytes")), 2)


def test_bad_pools():
    for parameters, says in [
        ({"capacity": 0}, "capacity=0"),
        ({"policy": "mru"}, "policy='mru': expected one of counter, lru, fifo"),
        ({"unit": "pages"}, "unit='pages'"),
        ({"capacity": 0.5, "unit": "bytes"}, r"capacity=0.5: expected a whole number of bytes"),
    ]:
        with pytest.raises(ValueError, match=says):
            Pool(**parameters)


def test_two_thousand_steps_under_pressure():
    """Random fetches over a link, a pool that is full from the start: bytes stay, and every step's output is
    attention over exactly the K and V of the positions that it reports."""
    model = tiny("llama", num_hidden_layers=1)
    link = ModelledLink(1e12, latency=0)
    cache = kvlab.KVCache(model, keep=Pool(24), store=Growing(), place=Host(Random(6), link))
    read_positions = reads_of(cache)
    layer, generator = cache.layers[0], torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 1, 2, 2_040, 8, generator=generator)
    queries = torch.randn(1, 4, 2_040, 8, generator=generator)
    layer.fill(Recorded(*(x[:, :, :40] for x in (queries, keys, values)), CAUSAL, 0.5))
    sizes, used = set(), set()
    for step in range(40, 2_040):
        layer.update(keys[:, :, step : step + 1], values[:, :, step : step + 1])
        out = layer.attend(queries[:, :, step : step + 1], CAUSAL, 0.5)
        index = read_positions[0].long()
        used.add(index.shape[2])
        if step % 20 == 0:
            stats = cache.stats()
            sizes.add((stats.device_bytes, stats.host_bytes, stats.tokens_held))
            rows = index.unsqueeze(-1).expand(-1, -1, -1, 8)
            expected, _ = attend(
                queries[:, :, step : step + 1], keys.gather(2, rows), values.gather(2, rows), 0.5
            )
            assert torch.allclose(out, expected, atol=1e-5)
            assert int(index[..., -1].min()) == step  # the newest is always attended
    assert used == {7} and len(sizes) == 1
    assert len(link.staging.buffers) <= 2 and math.isfinite(float(out.sum()))
