"""Linear layers on many rows by another library: what they give, to whom, and that no copy is kept."""

import copy

import pytest
import torch
from fast.stepped import decoded
from tiny import prompt, tiny
from torch import nn

from kvlab.fast import prompts
from kvlab.fast.compiled import compiled, engine_of
from kvlab.fast.narrow import weights_of
from kvlab.fast.prompts import BLOCK, LEAST, ROUND, PromptLinear, product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def seen(monkeypatch):
    """Rows of every product that oneDNN is given, on a machine of any kind."""
    rows, given = [], torch.Tensor.to_mkldnn
    monkeypatch.setattr(prompts, "faster", lambda: True)
    monkeypatch.setattr(prompts, "SMALL", 0)  # tests have small weights
    monkeypatch.setattr(prompts, "NONE", 0)

    def to_mkldnn(tensor):
        rows.append(len(tensor))
        return given(tensor)

    monkeypatch.setattr(torch.Tensor, "to_mkldnn", to_mkldnn)
    return rows


@pytest.mark.parametrize("biased", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("shape", [(1, LEAST), (3, 31), (1, BLOCK), (1, BLOCK + 1), (2, BLOCK + 37)])
@pytest.mark.parametrize("sizes", [(80, 96), (33, 1), (7, 161)])
def test_it_is_the_product(shape, sizes, biased, seen):
    torch.manual_seed(0)
    weight, bias = torch.randn(sizes[1], sizes[0]), torch.randn(sizes[1]) if biased else None
    x = torch.randn(*shape, sizes[0]).transpose(0, 1)  # strides of its own
    expected = nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    found = product(x, weight, bias)
    assert seen and found.shape == expected.shape and found.is_contiguous()
    assert {rows % ROUND for rows in seen[1 + biased :]} == {0}
    assert (found - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_a_compiled_model_can_be_narrowed(seen):
    model = compiled(compiled(copy.deepcopy(tiny("llama"))), "bf16")
    assert weights_of(model) == "bf16" and engine_of(model) == "compiled, bf16 weights"


def test_what_is_no_number_stays_in_its_row(seen):
    x, layer = torch.randn(BLOCK + 9, 24), PromptLinear(24, 40).requires_grad_(False)
    x[3, 5], x[BLOCK + 2, 0] = float("nan"), float("inf")
    found = layer(x)
    wrong = ~found.isfinite().all(1)
    assert seen and wrong.nonzero().flatten().tolist() == [3, BLOCK + 2]


def test_weights_are_read_at_every_call(seen):
    layer, x = PromptLinear(24, 40, bias=False).requires_grad_(False), torch.randn(LEAST, 24)
    before = layer(x)
    layer.weight.mul_(2)
    assert seen and torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_prompts_of_a_compiled_model_are_the_eager_ones(family, weights, seen):
    eager = copy.deepcopy(tiny(family))
    fast = compiled(copy.deepcopy(eager), weights)
    assert engine_of(fast).startswith("compiled")
    if weights != "fp32":
        for name, module in eager.named_modules():
            if isinstance(module, nn.Linear):
                narrow = fast.get_submodule(name)
                module.weight.data.copy_(narrow.widened(narrow.weight, narrow.scale))
    prompts = [prompt(LEAST + 9, seed=3), prompt(LEAST - 1, seed=4)]
    for spec in ("full", "h2o:budget=20"):
        found, expected = (decoded(model, spec, prompts) for model in (fast, eager))
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert seen


def test_a_model_that_stays_eager_keeps_its_layers(seen):
    model = copy.deepcopy(tiny("llama")).double()
    with pytest.warns(UserWarning, match="eager engine"):
        compiled(model)
    assert _kinds(model) == {nn.Linear}
    fast = compiled(copy.deepcopy(tiny("llama")))
    assert _kinds(fast) == _kinds(copy.deepcopy(fast)) == {PromptLinear}


def _kinds(model) -> set[type]:
    return {type(one) for one in model.modules() if isinstance(one, nn.Linear)}
