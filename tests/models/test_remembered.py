"""What kvlab remembers of a model holds as long as the model stays as it was."""

import copy
import random

import pytest
import torch
from tiny import prompt, tiny

import kvlab

REMEMBERING = (
    "infinigen:budget=9,full_layers=1", "kvquant", "h2o:budget=9,renumber=true", "expected:budget=9",
    "shadowkv:budget=0.3,rank=0.4,chunk=3,recent=1",
)  # fmt: skip


def other_weights(model, draw):
    block = draw.choice(model.model.layers)
    part = draw.choice((block.self_attn.q_proj, block.self_attn.k_proj, block.mlp.up_proj))
    with torch.no_grad():
        part.weight.mul_(draw.uniform(-3, -1))


def weights_exchanged(model, draw):
    weight = draw.choice(model.model.layers).self_attn.q_proj.weight
    weight.data = weight.data * draw.uniform(-3, -1)


def other_frequencies(model, draw):
    config = copy.deepcopy(model.config)
    config.rope_parameters = config.rope_parameters | {"rope_theta": draw.uniform(10.0, 500.0)}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def frequencies_written(model, draw):
    for name in ("inv_freq", "original_inv_freq"):
        getattr(model.model.rotary_emb, name).mul_(0.3)


def another_scale(model, draw):
    for block in model.model.layers:
        block.self_attn.scaling *= 2


def a_layer_less(model, draw):
    del model.model.layers[draw.randrange(1, 3)]
    model.config.num_hidden_layers -= 1
    for index, block in enumerate(model.model.layers):
        block.self_attn.layer_idx = index


CHANGES = (
    other_weights, weights_exchanged, other_frequencies, frequencies_written, another_scale, a_layer_less,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spec", REMEMBERING)
def test_a_changed_model_is_as_one_that_was_always_so(spec, change):
    seed = random.randrange(10**6)
    used, fresh = (kvlab.prepare(copy.deepcopy(tiny("llama"))) for _ in range(2))
    logprobs = lambda model: kvlab.decode(model, prompt(30), kvlab.make_cache(model, spec), 4).logprobs
    before = logprobs(used)
    for model in (used, fresh):
        change(model, random.Random(seed))
    assert torch.equal(logprobs(used), logprobs(fresh)), seed
    assert not torch.equal(logprobs(used), before)


def test_adapters_that_take_turns():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    used = peft.get_peft_model(copy.deepcopy(tiny("llama")), config, "one")
    used.add_adapter("other", config)
    fresh = copy.deepcopy(used)

    def logprobs(adapted):
        model = adapted.get_base_model()
        return kvlab.decode(model, prompt(30), kvlab.make_cache(model, REMEMBERING[0]), 4).logprobs

    before = logprobs(used)
    for one in (used, fresh):
        one.set_adapter("other")
    assert torch.equal(logprobs(used), logprobs(fresh))
    assert not torch.equal(logprobs(used), before)
