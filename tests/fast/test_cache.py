"""A cache decodes through the kernels where they fit, and says the same as without them."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from drawn import FORMS
from tiny import begun, fed, left_padded, prompt, tiny
from triton_here import needs_triton

import kvlab
import kvlab.fast
from kvlab.arithmetic import count_flops
from kvlab.fast import Fused
from kvlab.fast.known import coded, knows
from kvlab.keep import H2O, TOVA, Sinks
from kvlab.place import Host, InfiniGen, Link, TopK
from kvlab.store import Float4, Float8, Growing, Int, Kivi, Rotated, Static

packed = importlib.import_module("kvlab.fast.attend")

FITTING = {
    "full": {},
    "int8": {"store": Int(8)},
    "int4": {"store": Int(4, 16)},
    "fp8": {"store": Float8()},
    "int5": {"store": Int(5)},
    "int2, nvfp4": {"store": Growing(Int(2), Float4())},
    "kivi": {"store": Kivi(4, 4, 5)},
    "rotated": {"store": Rotated(Int(4))},
    "rotated keys": {"store": Growing(Rotated(Int(8), True), Int(8))},
    "rotated topk": {"store": Rotated(Int(8), True), "place": Host(TopK(9))},
    "static": {"store": Static(40, Int(8))},
    "sinks": {"store": Int(8), "keep": Sinks(9)},
    "h2o": {"keep": H2O(9)},
    "h2o fp8": {"store": Float8(), "keep": H2O(9)},
    "tova": {"store": Int(4), "keep": TOVA(9)},
    "h2o fetched": {"store": Int(8), "keep": H2O(9), "place": Host(TopK(4))},
    "topk": {"store": Int(8), "place": Host(TopK(9))},
    "host": {"place": Host(TopK(9))},
    "offload": {"store": Growing(Int(4)), "place": Host(link=Link())},
    "infinigen": {"store": Growing(Int(8)), "place": Host(InfiniGen(9), Link())},
}
PROMPTS = [prompt(23, seed=1), prompt(14, seed=2)]
OTHERS = {
    "asymmetric": {"store": Int(4, symmetric=False)},
    "renumbered keys": {"keep": Sinks(9, renumber=True)},
    "exact sinks": {"store": Growing(Int(8), sinks=2)},
}


def llama(kv_heads: int = 2):
    """Heads of 32 dimensions, two query heads for each KV head."""
    return tiny("llama", hidden_size=128, num_key_value_heads=kv_heads)


@pytest.fixture()
def calls(fused, monkeypatch):
    """The same list, which grows too for a step whose append is a call of its own."""
    attend = kvlab.fast.attend_packed
    monkeypatch.setattr(kvlab.fast, "attend_packed", lambda *args: fused.append(args[1]) or attend(*args))
    return fused


def without_kernels(monkeypatch):
    monkeypatch.setattr(kvlab.fast, "fits", lambda *_: False)
    monkeypatch.setattr(Fused, "of", lambda *_: None)


def decoded(model, answers, prompts, fork=None):
    return fed(model, answers, *left_padded(prompts), steps=5, fork=fork)[1][:, 1:]


def check_near(found, monkeypatch, *given):
    """Nearly what is decoded without kernels: a last digit may round one code of a later layer otherwise."""
    without_kernels(monkeypatch)
    expected = decoded(*given)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("name", FITTING)
def test_logits_are_those_without_kernels(name, calls, monkeypatch):
    model = llama()
    given = model, FITTING[name], PROMPTS, torch.tensor([1, 0, 1])
    found = decoded(*given)
    assert len(calls) == 5 * model.config.num_hidden_layers
    check_near(found, monkeypatch, *given)
    assert len(calls) == 5 * model.config.num_hidden_layers


def test_the_flops_of_a_step_are_those_without_kernels(calls, monkeypatch):
    counts, model = [], llama()
    for _ in range(2):
        stepper = begun(model, "int8", prompt(23))
        counts.append(count_flops(lambda: stepper.feed(prompt(1))))  # noqa: B023
        without_kernels(monkeypatch)
    assert counts[0] == counts[1] and len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", OTHERS)
def test_what_kernels_cannot_do_goes_without(name, calls):
    decoded(llama(), OTHERS[name], [prompt(23)])
    assert not calls


@pytest.mark.parametrize(
    "form", [form for form in FORMS if getattr(form, "scale", "fp16") == "fp16"], ids=str
)
def test_every_format_is_read_by_a_kernel_or_goes_without(form, calls, monkeypatch):
    """One that says nothing of kernels decodes first, and so does one that promises more than they know."""
    given = llama(), {"store": form}, [prompt(23)]
    found = decoded(*given)
    assert knows(coded(form)) or not calls
    if calls:
        check_near(found, monkeypatch, *given)


# On a GPU, or what stands in for one: the kernel of `fast/gpu.py` in Triton's interpreter, or a fake.


@pytest.fixture()
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(packed, "on_gpu", lambda query: True)
    monkeypatch.setattr(packed, "_trusted", {})
    monkeypatch.setattr(Fused, "of", lambda *_: None)  # a step in one call is the CPU's


@needs_triton
@pytest.mark.parametrize("name", ["int8", "int4", "rotated", "rotated keys", "static", "offload"])
def test_a_cache_on_a_gpu_decodes_through_triton(name, as_on_a_gpu, calls, monkeypatch):
    given = llama(), FITTING[name], PROMPTS
    found = decoded(*given)
    assert len(calls) == 5 * given[0].config.num_hidden_layers and list(packed._trusted.values()) == [True]
    check_near(found, monkeypatch, *given)


@needs_triton
def test_kivi_on_a_gpu_decodes_through_triton_once_something_is_written(as_on_a_gpu, calls, monkeypatch):
    """Prompts of 23 and 14 tokens fit into a window of 24: the second of five steps writes a block."""
    given = llama(), {"store": Kivi(4, 2, 24)}, PROMPTS
    found = decoded(*given)
    assert len(calls) == 4 * given[0].config.num_hidden_layers and list(packed._trusted.values()) == [True]
    assert {case[2] for case in packed._trusted} == {("Kivi", 4, 2)}
    check_near(found, monkeypatch, *given)


def refuse(*_):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    "kernel, says", [(lambda query, *_: 2 * query, "off the reference"), (refuse, "no such inst")]
)
def test_a_kernel_that_is_wrong_on_this_gpu_is_named_and_not_used_again(
    kernel, says, as_on_a_gpu, calls, monkeypatch
):
    fake = SimpleNamespace(attend=kernel, supports=lambda *_: True, TYPES=[torch.float32])
    monkeypatch.setitem(sys.modules, "kvlab.fast.gpu", fake)
    monkeypatch.setattr(kvlab.fast, "gpu", fake, raising=False)
    monkeypatch.setattr(packed, "_triton", lambda: True)
    model, prompts = llama(), [prompt(23, seed=1)]
    with pytest.warns(UserWarning, match=says) as warned:
        found = decoded(model, FITTING["int8"], prompts)
    assert len(warned) == len(calls) == 1
    without_kernels(monkeypatch)
    assert torch.equal(found, decoded(model, FITTING["int8"], prompts))
