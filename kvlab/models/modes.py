"""Modes: a model in eval mode, as long as something is measured or traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def evaluating(model) -> Iterator[None]:
    """The model in eval mode; then each of its modules is as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
