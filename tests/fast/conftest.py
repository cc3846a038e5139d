"""What the engine's tests share: models, and steps that are counted."""

import copy
import inspect

import pytest
import torch
from fast.atonce import of

from kvlab.fast import Fused, all_layers
from kvlab.fast.compiled import compiled


@pytest.fixture()
def steps(monkeypatch):
    """A list that grows by one entry for every pass of a compiled body, but for those that try it."""
    module = inspect.getmodule(compiled)
    made, difference, own = [], module._difference, module.Body.step

    def step(self, **given):
        made.append(given)
        return own(self, **given)

    monkeypatch.setattr(module.Body, "step", step)

    def tried(*given):
        count = len(made)
        try:
            return difference(*given)
        finally:
            del made[count:]

    monkeypatch.setattr(module, "_difference", tried)
    return made


@pytest.fixture()
def fused(monkeypatch):
    """A list that grows by one entry for every layer's step that went in one call."""
    made, call = [], Fused.call

    def counted(self, store, *args):
        out = call(self, store, *args)
        if out is not None:
            made.append(store)
        return out

    monkeypatch.setattr(Fused, "call", counted)
    return made


@pytest.fixture()
def went(monkeypatch):
    """A list of the steps that were tried in one call: True for those that went so."""
    made, step = [], all_layers.AllLayers.step

    def counted(self, *given):
        out = step(self, *given)
        made.append(out)
        return out

    monkeypatch.setattr(all_layers.AllLayers, "step", counted)
    return made


@pytest.fixture()
def one_thread():
    """One thread of torch's, and as many as before behind the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture()
def model(went):
    """(shape, family, weights) -> a model that decodes compiled, and was tried already."""

    def made(shape="grouped", family="llama", weights="fp32", **changes):
        fast = compiled(copy.deepcopy(of(shape, family, **changes)), weights)
        went.clear()
        return fast

    return made
