"""Profile: results of training or calibration for one model, in a file that a method reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..parameters import from_json, shown
from ..saved import inside, model_digest

FORMAT = "2"  # of the file; another one is refused


@dataclass(frozen=True)
class Profile:
    """arrays: by name; about: numbers by name that belong to them; model: `saved.model_digest` of their
    model; path: the file they were read from."""

    path: str
    model: str
    arrays: Mapping[str, np.ndarray]
    about: Mapping[str, float]

    def check(self, model, **shapes: tuple[int, ...]) -> None:
        """ValueError, one line, if it was made for a model with another digest, or does not fit."""
        if (digest := model_digest(model)) != self.model:
            raise ValueError(
                f"profile={self.path}: it was made for a model with digest {self.model}, not {digest} "
                "(recipes read a model in float32; another dtype has another digest)"
            )
        self.fits(**shapes)

    def fits(self, **shapes: tuple[int, ...]) -> None:
        """ValueError, one line, if an array's shape does not fit the model. shapes: by name."""
        for name, wanted in shapes.items():
            if (found := self.arrays[name].shape) != wanted:
                raise ValueError(f"profile={self.path}: {name} has shape {found}, expected {wanted}")


def check_folder(path: str | Path) -> None:
    """ValueError, one line, if this file's folder does not exist."""
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no such folder")


def write(path: str | Path, kind: str, model, tensors: Mapping[str, Tensor], **about: float) -> None:
    """Write a profile of a kind, such as "duo", as a safetensors file."""
    from safetensors.torch import save_file

    told = {"format": FORMAT, "kind": kind, "model": model_digest(model), "about": json.dumps(about)}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, told)


def read(path: str | Path, kind: str, **dimensions: int) -> Profile:
    """The profile of a kind in a file. dimensions: of the tensors that it must hold, by name. ValueError, one
    line, for any other file, or an incomplete one."""
    if not isinstance(path, str | Path):
        made = f"python -m course.recipes.{kind} makes one"
        raise ValueError(f"profile={shown(path)}: expected the file of a profile; {made}")
    told, tensors = inside(path, f"profile={path}: no profile can be read from it")
    if (told.get("format"), told.get("kind")) != (FORMAT, kind):
        raise ValueError(f"profile={path}: expected a profile of kind {kind!r}, in format {FORMAT}")
    for name, count in dimensions.items():
        held = tensors.get(name)
        if held is None or held.dim() != count or held.dtype != torch.float32 or not held.isfinite().all():
            raise ValueError(f"profile={path}: expected {name}, finite float32 of {count} dimensions")
    try:
        arrays = {name: tensors[name].numpy() for name in dimensions}
        return Profile(str(path), told["model"], arrays, dict(from_json(told["about"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profile={path}: it does not say which model and numbers it is of") from error
