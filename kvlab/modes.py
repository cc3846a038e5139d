"""Modes: what a cache keeps can be read and written in all of torch's modes, whichever it was made in.

A tensor made in `torch.inference_mode` can never be written into outside it, nor be saved for a gradient.
`evaluating`: a model in eval mode, as long as something is measured or traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


@contextmanager
def keeping() -> Iterator[None]:
    """What is made here can be kept. It builds no graph."""
    inside = torch.is_inference_mode_enabled()  # a graph that is exported does without the mode
    with torch.inference_mode(False) if inside else nullcontext(), torch.no_grad():
        yield


def kept(x: Tensor) -> Tensor:
    """The tensor, or a copy that can be kept; to be called inside `keeping`."""
    return x.clone() if x.is_inference() else x


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
