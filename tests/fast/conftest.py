"""What the engine's tests share: nothing is compiled to machine code by torch, and steps are counted."""

import copy
import inspect
import logging

import pytest
import torch
from fast.atonce import of

from kvlab.fast import traced, whole
from kvlab.fast.compiled import compiled


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Models are traced as for a compiler, and the graph's operations are run one by one, in milliseconds."""
    monkeypatch.setattr(traced, "BACKEND", "eager")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # megabytes, kept by pytest


@pytest.fixture()
def steps(monkeypatch):
    """A list that grows by one entry for every pass of a compiled body, but for those that try it."""
    module = inspect.getmodule(compiled)
    made, difference = [], module._difference
    for kind in (module.Body, module.Traced):

        def step(self, *, own=kind.step, **given):
            made.append(given)
            return own(self, **given)

        monkeypatch.setattr(kind, "step", step)

    def tried(*given):
        count = len(made)
        try:
            return difference(*given)
        finally:
            del made[count:]

    monkeypatch.setattr(module, "_difference", tried)
    return made


@pytest.fixture()
def went(monkeypatch):
    """A list of the steps that were tried in one call: True for those that went so."""
    made, step = [], whole.Whole.step

    def counted(self, *given):
        out = step(self, *given)
        made.append(out)
        return out

    monkeypatch.setattr(whole.Whole, "step", counted)
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
