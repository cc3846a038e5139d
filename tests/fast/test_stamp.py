"""A model that is changed while it decodes: every step computes with what the model is then."""

import copy
import warnings

import pytest
import torch
from tiny import VOCABULARY, begun, prompt, tiny
from torch import nn
from torch.nn.utils import parametrize

from kvlab.fast.compiled import compiled, engine_of


def pair():
    """A model, and a copy of it that decodes by the compiled engine."""
    eager = tiny("llama")
    return eager, compiled(copy.deepcopy(eager))


def turned(module, given, out):
    """A hook that turns what a module gives round."""
    if hasattr(out, "last_hidden_state"):
        out.last_hidden_state = -out.last_hidden_state
        return out
    return tuple(-x for x in out) if isinstance(out, tuple) else -out


def halved(model):
    given = {name: weight.clone() for name, weight in model.state_dict().items()}
    given["model.layers.1.mlp.down_proj.weight"] *= 0.5
    model.load_state_dict(given, assign=True)


def another(linear):
    """As an adapter puts one in the place of a linear layer."""
    new = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    new.weight.data = linear.weight.data.flip(0)
    return new


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def put(path, name, make):
    """A change that puts `make(old)` in the place of an attribute."""

    def change(model):
        owner = model.get_submodule(path)
        setattr(owner, name, make(getattr(owner, name)))

    return change


def forward_of(model):
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: 2 * own(x)


def transposed(model):
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.t()


def pruned(model):
    """As structured pruning leaves an MLP, whose weights lie where they were."""
    mlp = model.model.layers[1].mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = linear.weight.data[:40]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :40]


def shortened(model):
    model.lm_head.weight.data = model.lm_head.weight.data[:50]


def parametrized(model):
    parametrize.register_parametrization(model.model.layers[1].mlp.down_proj, "weight", Doubled())


LAYER = "model.layers.1"
CHANGES = {  # what is done to a model whose steps are compiled -> by which engine the next ones go
    "assigned weights": (halved, "compiled"),
    "another linear layer": (put(f"{LAYER}.mlp", "gate_proj", another), "compiled"),
    "another head": (put("", "lm_head", another), "compiled"),
    "another embedding": (lambda m: m.resize_token_embeddings(VOCABULARY + 3), "compiled"),
    "transposed weights": (transposed, "eager"),
    "a pruned MLP": (pruned, "eager"),
    "a shorter head": (shortened, "compiled"),
    "another scaling": (put(f"{LAYER}.self_attn", "scaling", lambda x: 3 * x), "compiled"),
    "another eps in one": (put("model.norm", "variance_epsilon", lambda x: 0.04), "eager"),
    "other frequencies": (lambda m: m.model.rotary_emb.inv_freq.mul_(0.5), "compiled"),
    "parametrized": (parametrized, "eager"),
    "another activation": (put(f"{LAYER}.mlp", "act_fn", lambda _: nn.GELU()), "eager"),
    "a module's forward": (forward_of, "eager"),
    "hidden states asked for": (lambda m: setattr(m.config, "output_hidden_states", True), "eager"),
    **{
        f"hook on {path}": (
            lambda m, path=path: m.get_submodule(path).register_forward_hook(turned),
            "eager",
        )
        for path in (
            f"{LAYER}.mlp", f"{LAYER}.self_attn.q_proj", f"{LAYER}.input_layernorm", "lm_head", "model.norm",
            "model.embed_tokens", "model.rotary_emb", LAYER, "model",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_computes_with_what_the_model_is_now(change, steps):
    """Amid a text: the prompt and some steps are already there."""
    alter, engine = CHANGES[change]
    models, found = [copy.deepcopy(model) for model in pair()], []
    for model in models:
        stepper = begun(model, "full", prompt(12), prompt(1))
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            alter(model)
            found.append(torch.stack([stepper.feed(prompt(1, seed=step), last=True) for step in range(4)]))
    lines = [str(one.message) for one in said]
    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[0].abs().max()
    assert engine_of(models[1]) == engine
    assert len(steps) == (5 if engine == "compiled" else 1)
    assert len(lines) == (engine == "eager") and all("\n" not in line for line in lines), "one line, once"


def test_weights_that_no_longer_fit_are_not_read():
    """The compiled code takes the sizes of one for the other's."""
    _, fast = pair()
    stepper = begun(fast, "full", prompt(5))
    up = fast.model.layers[1].mlp.up_proj
    up.weight.data = up.weight.data[:40]
    with pytest.warns(UserWarning, match="eager engine"), pytest.raises(RuntimeError, match="must match"):
        stepper.feed(prompt(1))
