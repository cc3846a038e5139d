"""Devices: a model over several devices, by accelerate's maps, CPU and disk offload included.

accelerate's hooks bring a block's weights and inputs to its device. A cache layer takes K and V from its
block, so it is on the block's device; nothing here moves it.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch

from .parameters import check_file, from_json, shown


def read_map(device_map) -> str | dict:
    """ "auto", a dictionary {module: device} as accelerate takes it, or the JSON file that holds one.

    Raises ValueError for anything else.
    """
    if isinstance(device_map, dict) or device_map == "auto":
        return device_map
    try:
        check_file(device_map)
        found = from_json(Path(device_map).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"device_map={str(device_map)!r}: expected auto, or a JSON file {{module: device}} ({error})"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(place, str | int) for place in found.values()):
        raise ValueError(f"device_map={str(device_map)!r}: expected {{module: device}} in it")
    return found


def entry_of(model) -> torch.device:
    """The device for token ids: the model's, or the CPU if its first weights are loaded from elsewhere at
    every use."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def check_loaded(model) -> None:
    """ValueError for a model with weights that are nowhere: on torch's meta device, and no hook of
    accelerate's brings them."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if weight.is_meta:
            raise ValueError(
                f"model: {name} is on torch's meta device, which holds no numbers: load the model's weights"
            )


def refuse_offloaded(model, what: str) -> None:
    """ValueError if `what` needs weights that are offloaded between passes."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{what}: it needs the model's weights, but the device map offloads some of them; put every "
            "block on a device that holds it"
        )


def device_of(device) -> torch.device:
    """A device by its name; ValueError for an invalid name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"device={shown(device)}: expected a device such as cpu or cuda") from None
