"""What the engine's tests share: nothing is compiled to machine code by torch, and steps are counted."""

import inspect
import logging

import pytest

from kvlab.engine import compiled, traced


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
