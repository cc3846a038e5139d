"""Reading the arguments that lm-eval passes to a model."""

from __future__ import annotations

import sys

import torch

from kvlab.spec import Spec


def with_parameters(method: str | Spec, parameters: dict) -> str | Spec:
    """A method whose further parameters came as arguments of their own, since lm-eval splits at commas."""
    extra = ",".join(f"{name}={value}" for name, value in parameters.items())
    return f"{method}{',' if ':' in str(method) else ':'}{extra}" if extra else method


def without_cuda(device: str | None) -> str | None:
    """The CPU in the place of a CUDA device that is not there, with a note."""
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        print(f"kvlab: device {device} is not there; the model runs on the CPU", file=sys.stderr)
        return "cpu"
    return device
