"""Data: the released models, devices and flags that the bill knows, each with its source and date."""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path

from ..arithmetic import Machine
from .describe import describe

HERE = Path(__file__).parent


@functools.cache
def table(name: str) -> dict:
    """`models`, `devices` or `flags`: the file of that name."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def model_named(name: str) -> tuple[str, dict]:
    """(Name, entry as `describe` returns it) of a released model, a folder with a config.json, or that file.

    The organisation may be left out. ValueError, naming the nearest, for anything else.
    """
    known, path = table("models")["models"], Path(name)
    found = _find(name, {**known, **{key.split("/")[1]: entry for key, entry in known.items()}})
    if found is not None:
        key = next(key for key in known if key.lower().endswith(found.lower()))
        return key, known[key]
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"model={name!r}: this folder has no config.json")
    if path.exists():
        return name, _described(path)
    raise ValueError(f"model={name!r} is no folder and not known{_nearest(name, known)}")


def _described(path: Path) -> dict:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError, KeyError, TypeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model={str(path)!r}: not a configuration that transformers reads: {why}"
        ) from error
    return describe(config)


def device_named(name: str) -> tuple[str, dict]:
    """(Name, entry) of a device, upper or lower case. ValueError, naming the nearest, for another."""
    known = table("devices")["devices"]
    found = _find(name, known)
    if found is None:
        raise ValueError(f"device={name!r} is not known{_nearest(name, known)}")
    return found, known[found]


def machine(device: dict) -> Machine:
    """What a roofline needs of a device."""
    return Machine(device["flops"], device["bandwidth"], device["link"])


def _find(name: str, known) -> str | None:
    return next((key for key in known if key.lower() == name.strip().lower()), None)


def _nearest(name: str, known) -> str:
    """The three nearest names, else all of them."""
    lower = {part.lower(): key for key in known for part in (key.split("/")[-1], key)}
    near = difflib.get_close_matches(name.lower(), lower, n=4, cutoff=0.4)
    some = list(dict.fromkeys(lower[part] for part in near))[:3]
    return f", did you mean {' or '.join(some)}?" if some else f"; known: {', '.join(known)}"
