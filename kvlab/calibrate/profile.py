"""Profile: what training or calibration has found out about one model, as a file that a method reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..saved import model_digest

FORMAT = "2"  # of the file; another one is refused


@dataclass(frozen=True)
class Profile:
    """tensors: by name; about: numbers by name that belong to them; model: `saved.model_digest` of the model
    that they are of; path: where they were read. A policy takes from it what it needs."""

    path: str
    kind: str
    model: str
    tensors: Mapping[str, Tensor]
    about: Mapping[str, float]


def check(path: str, made_for: str, model, **shapes: tuple[tuple, tuple]) -> None:
    """ValueError, one line, where the profile in this file was made for a model with another digest, or where
    it does not fit (`fits`)."""
    if (digest := model_digest(model)) != made_for:
        raise ValueError(
            f"profile={path}: it was made for a model with digest {made_for}, not {digest} "
            "(recipes read a model in float32; another dtype has another digest)"
        )
    fits(path, **shapes)


def fits(path: str, **shapes: tuple[tuple, tuple]) -> None:
    """ValueError, one line, where a tensor of the profile in this file has another shape than a model asks
    for. shapes: (its own, the other), by name."""
    for name, (found, wanted) in shapes.items():
        if tuple(found) != wanted:
            raise ValueError(f"profile={path}: {name} has shape {tuple(found)}, expected {wanted}")


def check_folder(path: str | Path) -> None:
    """ValueError, one line, where no profile could be written to this file, since its folder is not there."""
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no such folder")


def write(path: str | Path, kind: str, model, tensors: Mapping[str, Tensor], **about: float) -> None:
    """Write a profile of a kind, such as "duo", as a safetensors file."""
    from safetensors.torch import save_file

    told = {"format": FORMAT, "kind": kind, "model": model_digest(model), "about": json.dumps(about)}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, told)


def read(path: str | Path, kind: str, **dimensions: int) -> Profile:
    """The profile of a kind in a file. dimensions: of the tensors that it must hold, by name. ValueError, one
    line, for a file that holds none, or that lacks something."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"profile={path}: {' '.join(str(error).split())}") from error
    if (told.get("format"), told.get("kind")) != (FORMAT, kind):
        raise ValueError(f"profile={path}: expected a profile of kind {kind!r}, in format {FORMAT}")
    for name, count in dimensions.items():
        held = tensors.get(name)
        if held is None or held.dim() != count or held.dtype != torch.float32 or not held.isfinite().all():
            raise ValueError(f"profile={path}: expected {name}, finite float32 of {count} dimensions")
    try:
        about = dict(json.loads(told["about"]))
        return Profile(str(path), kind, told["model"], tensors, about)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profile={path}: it does not say which model and numbers it is of") from error
