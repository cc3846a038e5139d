"""A rehearsal computes the query and nothing that it does not need."""

import copy
import gc
import weakref

import pytest
import torch
from tiny import begun, prompt, tiny
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvlab
from kvlab.calibrate.fold import fold
from kvlab.models import attention_of, blocks_of, query_of


class Products(TorchFunctionMode):
    """Counts the weights that linear modules multiply with."""

    def __init__(self):
        super().__init__()
        self.weights = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear:
            self.weights += args[1].numel()
        return function(*args, **(kwargs or {}))


def weights_of(model, spec: str, ids) -> int:
    """Those of the second decode step."""
    stepper = begun(model, spec, ids, ids[:, :1])
    with Products() as found:
        stepper.feed(ids[:, 1:2])
    return found.weights


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "opt"])
def test_no_keys_and_values_are_computed_twice(name):
    """A step multiplies with W_q once more in every layer that rehearses, and with nothing else."""
    model, ids = tiny(name), prompt(30)
    blocks = blocks_of(model)
    query = sum(attention_of(block).q_proj.weight.numel() for block in blocks[2:])
    assert weights_of(model, "infinigen", ids) - weights_of(model, "full", ids) == query


def test_what_is_rehearsed_is_the_query_for_the_input_of_the_block_before(monkeypatch):
    """From there on, what is fetched is compared in tests/reference."""
    model, inputs, asked = copy.deepcopy(tiny("llama", num_hidden_layers=4)), {}, {}
    cache, blocks = kvlab.make_cache(model, "infinigen:budget=9,full_layers=1"), model.model.layers
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: inputs.update(
                {index: (args[0], kwargs["position_embeddings"])}
            ),
            with_kwargs=True,
        )
    goes_on = cache.speculate
    noted = lambda index, query: asked.update({index: query()}) or goes_on(index, query)
    monkeypatch.setattr(cache, "speculate", noted)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(31, rows=2))
    for step in range(3):
        stepper.feed(prompt(1, rows=2, seed=step))
        assert asked.keys() == {1, 2, 3}
        for index, query in asked.items():
            hidden, (cos, sin) = inputs[index - 1]
            block = blocks[index]
            right = (
                block.self_attn.q_proj(block.input_layernorm(hidden)).unflatten(-1, (4, -1)).transpose(1, 2)
            )
            assert torch.allclose(query, apply_rotary_pos_emb(right, right, cos, sin)[0], atol=1e-5)
        asked.clear()


@pytest.mark.parametrize("variant", ["paper", "official-accuracy"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_folded_model_multiplies_only_the_chosen_columns(batch, variant, monkeypatch):
    """What a row guesses by is the same as with its whole query, also after rows changed places."""
    model = fold(copy.deepcopy(tiny("opt")))
    width, asked = model.config.hidden_size, []
    method = kvlab.place.InfiniGen(budget=0.5, ratio=0.25, full_layers=1, variant=variant)
    cache = kvlab.KVCache(model, place=kvlab.place.Host(method))
    chosen = type(method).speculate

    def noted(self, layer, query):
        found, state = chosen(self, layer, query), layer.state
        more = {"norm": layer.index - 1} if variant != "paper" else {}
        whole, part = query(**more), query(**more, narrow=state.asks)
        asked.append((state.partial_columns(whole), state.partial_columns(part), part))
        return found

    monkeypatch.setattr(type(method), "speculate", noted)
    ids = prompt(40, rows=batch)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids)
    for at in range(3):
        stepper.feed(ids[:, at : at + 1])
    cache.reorder_cache(torch.arange(batch).flip(0))
    stepper.feed(ids.flip(0)[:, 3:4])
    assert len(asked) == 4 * (model.config.num_hidden_layers - 1)
    for whole, part, query in asked:
        assert torch.allclose(whole, part, atol=1e-6)
        assert (query[..., 0, :] == 0).any() and query.abs().sum() > 0
    monkeypatch.undo()
    if batch == 1 and variant == "paper":
        layers, counted = model.config.num_hidden_layers, weights_of(model, "infinigen:ratio=0.25", ids)
        assert counted - weights_of(model, "full", ids) == (layers - 2) * width * width // 4


def test_a_replaced_part_is_asked():
    model = kvlab.prepare(copy.deepcopy(tiny("opt")))
    hidden, attention = torch.randn(1, 1, model.config.hidden_size), attention_of(blocks_of(model)[1])
    with torch.no_grad():
        before = query_of(model, 1, hidden)
        attention.q_proj = copy.deepcopy(attention.q_proj)
        attention.q_proj.weight.mul_(2.0)
        attention.q_proj.bias.mul_(2.0)
        assert torch.allclose(query_of(model, 1, hidden), 2 * before)


def test_a_saved_cache_of_a_folded_model_goes_on(tmp_path):
    model, ids = fold(copy.deepcopy(tiny("opt"))), prompt(40)
    stepper = begun(model, "infinigen:budget=0.5", ids, ids[:, :1])
    cache = stepper.cache
    cache.save(tmp_path / "cache")
    again = kvlab.Stepper(model, kvlab.load_cache(tmp_path / "cache", model))
    for at in range(1, 4):
        token = ids[:, at : at + 1]
        assert torch.allclose(again.feed(token, last=True), stepper.feed(token, last=True), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_model_that_rehearsed_can_be_freed(name):
    model = copy.deepcopy(tiny(name))
    kvlab.decode(model, prompt(20), kvlab.make_cache(model, "infinigen"), 3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
