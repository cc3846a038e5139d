"""Weights in bf16 and int8: what is computed with them is what the widened ones give, and memory is less."""

import copy

import pytest
import torch
from fast.stepped import decoded, read_in_place
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.fast.compiled import compiled, engine_of
from kvlab.fast.narrow import NarrowEmbedding, NarrowLinear

KINDS = ("bf16", "int8")
CANNOT = "OPTForCausalLM cannot use it: it is no Llama-shaped model"


def numbers(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a weight, defined without the code under test."""
    if kind == "bf16":
        return weight.bfloat16().float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return torch.round(weight / scale) * scale


@torch.no_grad()
def pair(kind: str, family: str, **changes):
    """A model that decodes with narrow weights, and an eager one in fp32 with the numbers that are left."""
    plain = copy.deepcopy(tiny(family, **changes))
    fast = compiled(copy.deepcopy(plain), kind)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert type(fast.get_submodule(name)) is NarrowLinear
            module.weight.copy_(numbers(module.weight, kind))
    return plain, fast


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"tie_word_embeddings": True}), ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}), ("qwen3", {"hidden_size": 36}),
    ],
    ids=["tied", "untied", "biases", "head norms"],
)  # fmt: skip
def test_logits_are_those_of_the_widened_weights(kind, family, changes, steps):
    """Prompts and steps, rows of a padded batch, forks."""
    eager, fast = pair(kind, family, **changes)
    tied = eager.lm_head.weight is eager.model.embed_tokens.weight
    assert tied == changes.get("tie_word_embeddings", tied)
    assert (type(fast.model.embed_tokens) is NarrowEmbedding) == tied
    assert engine_of(fast) == f"compiled, {kind} weights" and engine_of(eager) == "eager"
    for spec in ("full", "sinks:budget=9"):
        prompts = [prompt(23, seed=1), prompt(14, seed=2)]
        found, expected = (decoded(model, spec, prompts) for model in (fast, eager))
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(steps) == 2 * (6 + 2)


@pytest.mark.parametrize("kind, per_weight", [("bf16", 2), ("int8", 1)])
def test_weights_are_held_once_and_read_where_they_are(kind, per_weight):
    plain = tiny("llama", tie_word_embeddings=True)
    fast = compiled(copy.deepcopy(plain), kind)
    rest = {"norm": 4, "bias": 4}
    expected = sum(
        p.numel() * next((size for word, size in rest.items() if word in name), per_weight)
        for name, p in plain.named_parameters()
    )
    rows = sum(m.out_features for m in plain.modules() if isinstance(m, torch.nn.Linear))
    held = sum(p.nbytes for p in fast.parameters())
    assert held == expected + (4 * rows if kind == "int8" else 0)
    assert read_in_place(fast)


def test_a_copy_decodes_alike_and_neither_is_written(tmp_path):
    fast = compiled(copy.deepcopy(tiny("llama")), "int8")
    twin = copy.deepcopy(fast)
    assert torch.equal(*(decoded(model, "int8", [prompt(12)]) for model in (fast, twin)))
    assert engine_of(twin) == "compiled, int8 weights"
    for model in (fast, twin):
        with pytest.raises(TypeError, match="without weights= to write it"):
            model.save_pretrained(tmp_path)


def test_other_code_does_not_take_codes_for_weights():
    """Weights that are averaged, tied or replaced: floats would be cut to integers."""
    fast = compiled(copy.deepcopy(tiny("llama", tie_word_embeddings=True)), "bf16")
    linear = fast.model.layers[1].mlp.up_proj
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    for use in (lambda: linear.weight, lambda: setattr(linear, "weight", weight)):
        with pytest.raises((AttributeError, TypeError), match="narrow weights: load it without weights="):
            use()
    assert not hasattr(linear, "weight") and fast.tie_weights() is None  # as lm-eval's own model asks
    before = decoded(fast, "full", [prompt(12)])
    with pytest.warns(UserWarning, match="eager engine"):
        after = decoded(fast.double(), "full", [prompt(12)])
    assert torch.allclose(before.double(), after.double(), atol=1e-4)


def test_a_text_is_generated_and_a_hook_makes_it_eager_with_the_same_weights():
    fast = compiled(copy.deepcopy(tiny("llama")), "int8")
    ids, mask = left_padded([prompt(9), prompt(6, seed=1)])
    tokens = [kvlab.decode(fast, ids, kvlab.make_cache(fast, "full"), 6, attention_mask=mask).tokens]
    fast.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="eager engine: a hook is on a module"):
        tokens.append(kvlab.decode(fast, ids, kvlab.make_cache(fast, "full"), 6, attention_mask=mask).tokens)
    assert torch.equal(*tokens) and engine_of(fast) == "eager, int8 weights"


def nan(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = torch.nan
    return model


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: tiny("opt"), CANNOT),
        (
            lambda: copy.deepcopy(tiny("llama")).bfloat16(),
            "it compiles models in fp32 on a CPU",
        ),
        (
            lambda: nan(copy.deepcopy(tiny("llama"))),
            "'model.layers.1.mlp.up_proj.weight' holds NaN or infinity",
        ),
        (lambda: compiled(copy.deepcopy(tiny("llama")), "bf16"), "holds them in bf16 already; load it again"),
    ],
    ids=["another shape", "another dtype", "nan", "twice"],
)
def test_a_model_that_cannot_is_refused_in_a_line_and_stays_as_it_was(make, says):
    model = make()
    before = [(type(one), id(one)) for one in model.modules()]
    with pytest.raises(ValueError, match=says) as error:
        compiled(model, "int8")
    assert "\n" not in str(error.value) and str(error.value).startswith("weights='int8': ")
    assert before == [(type(one), id(one)) for one in model.modules()]


def test_load_takes_weights():
    model = kvlab.load(engine="compiled", weights="int8")[0]
    assert engine_of(model) == "compiled, int8 weights"
    with pytest.raises(ValueError, match="weights='int4': expected one of fp32, bf16, int8"):
        kvlab.load(engine="compiled", weights="int4")
    with pytest.raises(ValueError, match="the eager engine reads fp32 alone; add engine='compiled'"):
        kvlab.load(weights="bf16")
