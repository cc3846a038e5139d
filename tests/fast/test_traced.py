"""A step of a model of any shape, its own forward as one graph, says what the model says; or it is eager."""

import copy
import shutil
import warnings

import pytest
import torch
from families.models import FAMILIES, family
from tiny import prompt, tiny

import kvlab
from kvlab.fast import traced
from kvlab.fast.compiled import Body, compiled, engine_of
from kvlab.fast.traced import Traced

EAGER = {  # family -> why
    **dict.fromkeys(("Llama 4", "Llama 4, chunk 64"), "see by a rule of their own"),
    **dict.fromkeys(
        ("Qwen3-Next", "LFM2", "Granite 4", "Jamba", "Falcon-H1", "DeepSeek-V2", "DeepSeek-V3"),
        "hold something else than K and V",
    ),
}


def decoded(model, spec="full", count=9, position_ids=True):
    """Logits after a prompt longer than every window, and of steps after it."""
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
    stepper._takes_positions &= position_ids
    found = [stepper.feed(prompt(11), last=True)]
    found += [stepper.feed(prompt(1, seed=step), last=True) for step in range(count)]
    return torch.cat(found)


def near(found, expected):
    return (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_models_own(name, steps):
    model = kvlab.prepare(family(name).eval())
    expected = decoded(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert compiled(model) is model
    said = [str(one.message) for one in said if "engine" in str(one.message)]
    assert near(decoded(model), expected)
    if name in EAGER:
        assert engine_of(model) == "eager" and len(said) == 1 and not steps
        assert EAGER[name] in said[0] and "\n" not in said[0]
    else:
        kind = Body if name == "Llama" else Traced
        assert isinstance(model.forward.body, kind) and len(steps) == 9 and not said


@pytest.mark.parametrize("spec", ["int8", "h2o:budget=0.4", "paged:block=4", "kivi2:group=4,recent=6",
                                  "topk:budget=0.3,link=1e9", "adakv:of=h2o,budget=0.4"])  # fmt: skip
def test_methods_work_through_it(spec, steps):
    model = copy.deepcopy(tiny("gpt_neox"))
    expected = decoded(model, spec)
    assert near(decoded(compiled(model), spec), expected) and len(steps) == 9


def test_two_models_never_share_a_graph_and_new_weights_count(steps):
    """Of one shape, of another number of layers, a copy; new numbers in a parameter, and new parameters."""
    first = compiled(copy.deepcopy(tiny("opt")))
    second = compiled(copy.deepcopy(tiny("opt", num_hidden_layers=2)))
    twin = copy.deepcopy(first)
    third = copy.deepcopy(first)
    with torch.no_grad():
        twin.model.decoder.layers[0].fc1.weight.mul_(3)
        third.load_state_dict({name: 1.5 * x for name, x in third.state_dict().items()}, assign=True)
    graph = first.forward.body
    for model in (first, second, twin, third, first, second):
        plain = copy.deepcopy(model)
        del plain.forward
        assert near(decoded(model), decoded(plain))
    assert len(steps) == 6 * 9
    with torch.no_grad():
        first.model.decoder.layers[0].fc1.weight.mul_(3)
        first.model.decoder.layers[1].fc1.weight.data = 2 * first.model.decoder.layers[1].fc1.weight
    plain = copy.deepcopy(first)
    del plain.forward
    assert near(decoded(first), decoded(plain)) and first.forward.body is graph, "nothing was traced again"
    first.model.decoder.layers[1].activation_fn = torch.nn.SiLU()
    plain.model.decoder.layers[1].activation_fn = torch.nn.SiLU()
    assert near(decoded(first), decoded(plain)) and first.forward.body is not graph


def test_parameters_are_held_once():
    model = compiled(copy.deepcopy(tiny("gpt2")))
    held = {id(each) for each in model.parameters()}
    (twin,) = (x.cell_contents for x in model.forward.body.graph.__wrapped__.__closure__)
    assert {id(each) for each in twin.parameters()} == held and twin is not model


def test_what_the_graph_does_not_serve_goes_through_the_models_modules(steps):
    """Several rows; a padded row whose positions the model works out itself."""
    eager = tiny("gpt2")
    fast = compiled(copy.deepcopy(eager))
    found = []
    for model in (eager, fast):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
        stepper.feed(torch.cat([prompt(6), prompt(6, seed=1)]))
        found.append(stepper.feed(prompt(1, 2), last=True))
        stepper.fork(torch.tensor([1]))
        found.append(stepper.feed(prompt(1), last=True))  # one row: through the graph
        stepper = kvlab.Stepper(model, cache := kvlab.make_cache(model, "full"))
        mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
        stepper.feed(prompt(6), mask)
        found.append(stepper.feed(prompt(1), last=True))  # padded, with its position: too
        with torch.no_grad():
            mask = torch.cat([mask, mask.new_ones(1, 2)], 1)
            found.append(model(prompt(1), past_key_values=cache, attention_mask=mask).logits[:, -1])
    assert len(steps) == 2
    assert all(near(*two) for two in zip(found[4:], found[:4], strict=True))


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind, more, engine", [("longrope", LONG, "compiled"), ("dynamic", {}, "eager")])
def test_a_rotary_embedding_that_depends_on_the_length(kind, more, engine, recwarn):
    """transformers computes the one within the pass; of the other it looks at the text's length first."""
    rotary = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4} | more
    eager = tiny.__wrapped__("llama", rope_parameters=rotary)
    fast = compiled(copy.deepcopy(eager))
    assert engine_of(fast) == engine
    assert engine_of(fast, 2) == ("compiled, eager above 1 row" if engine == "compiled" else "eager")
    assert near(decoded(fast), decoded(eager)), "from 12 to 20 tokens"


@pytest.mark.parametrize("tokens", [6, 7, 8, 20])
def test_a_sliding_window_is_known_from_a_chunk(tokens):
    queries, keys = torch.arange(64)[None], torch.arange(64)[None, None]

    def window(row, head, query, key):
        return key > query - tokens

    def chunk(row, head, query, key):
        return key // tokens == query // tokens

    assert traced._slides(traced.Visibility(None, window, tokens))
    assert not traced._slides(traced.Visibility(None, window, tokens + 1))
    assert not traced._slides(traced.Visibility(None, chunk, tokens))
    assert not traced._slides(traced.Visibility(None, window))
    assert traced.Visibility(None, window, tokens).allowed(queries, keys).any()


def test_a_cache_gets_copies_and_gives_a_tensor_of_its_own():
    """The graph writes into the same memory at every step."""

    class Keeps:
        def update(self, keys, values, layer):
            self.given = [keys, values]
            return self, self

        def attend(self, query, *_):
            self.given.append(query)
            return query  # as a method might

    cache = Keeps()
    traced._register()
    given = [torch.randn(1, heads, 1, 8) for heads in (4, 2, 2)]
    token = traced._running.set((cache, [None]))
    out = torch.ops.kvlab.attend(*given, None, 0, 0.5, None)
    traced._running.reset(token)
    places = {x.untyped_storage().data_ptr() for x in (*cache.given, out)}
    assert not places & {x.untyped_storage().data_ptr() for x in given} and out.shape == (1, 1, 4, 8)


def test_nan_does_not_vanish():
    model = compiled(copy.deepcopy(tiny("opt")))
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    stepper.feed(prompt(5))
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"fc1.weight' holds NaN"):
        stepper.feed(prompt(1))


@pytest.mark.parametrize("named", [None, "g++", "no-compiler -O1", '"g++ -O1'])
def test_without_a_compiler_one_line_says_so(named, monkeypatch):
    monkeypatch.setattr(traced, "BACKEND", "inductor")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    model = copy.deepcopy(tiny("opt"))
    with pytest.warns(UserWarning, match="eager engine: torch.compile needs a C.. compiler") as said:
        compiled(model)
    assert engine_of(model) == "eager" and len(said) == 1 and "\n" not in str(said[0].message)


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("named", ["g++", "g++ -O1", " ", "", None])
def test_torch_is_told_which_compiler_it_shall_use(named, monkeypatch):
    """Options behind its name are no part of it; an empty name is none."""
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    monkeypatch.setattr(traced, "BACKEND", "inductor")
    monkeypatch.setattr(traced, "COMPILERS", ("g++",))
    told = {}
    monkeypatch.setattr(torch, "compile", lambda step, **how: told.update(how) or step)
    assert engine_of(compiled(copy.deepcopy(tiny("opt")))) == "compiled"
    assert told["options"]["cpp.cxx"] == (shutil.which("g++"),)


@pytest.mark.slow
@pytest.mark.skipif(not traced.compiler(), reason="no C++ compiler for torch.compile")
def test_machine_code_says_what_the_model_says(steps, monkeypatch, tmp_path):
    """As on every machine of a user: all other tests run the graph's operations one by one."""
    monkeypatch.setattr(traced, "BACKEND", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing was compiled before
    eager = tiny("opt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the eager engine")
        fast = compiled(copy.deepcopy(eager))
        found = decoded(fast)
    assert engine_of(fast) == "compiled" and len(steps) == 9
    assert near(found, decoded(eager))


def test_what_torch_does_not_take_stays_eager(monkeypatch):
    """A forward that looks at its numbers is no one graph."""
    model = copy.deepcopy(tiny("opt"))
    fc = model.model.decoder.layers[1]
    fc.activation_fn = Looks()
    with pytest.warns(UserWarning, match="eager engine: torch.compile does not take it") as said:
        compiled(model)
    assert engine_of(model) == "eager" and len(said) == 1 and "\n" not in str(said[0].message)


class Looks(torch.nn.Module):
    def forward(self, x):
        return x.relu() if float(x.abs().max()) > -1 else x
