"""Data: the released models, devices and flags that the bill knows, each with its source and date."""

from __future__ import annotations

import difflib
import functools
import json
import os
from pathlib import Path

from ..arithmetic import Machine
from ..errors import first_line
from ..finding import PROFILED
from ..methods import METHODS
from ..models import source_of
from ..parameters import shown
from .describe import describe

HERE = Path(__file__).parent


@functools.cache
def table(name: str) -> dict:
    """`models`, `devices` or `flags`: the file of that name; flags with the methods that name them as their
    nearest technique, or that they name themselves (`as`)."""
    found = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    for technique in found.get("techniques", ()):
        near = (one.name for one in (METHODS | PROFILED).values() if one.technique == technique["name"])
        technique["methods"] = [*near, *technique.get("as", [])]
    return found


def model_named(name: str | os.PathLike) -> tuple[str, dict]:
    """(Name, entry as `describe` returns it) of a released model, whose organisation may be left out, of a
    folder with a config.json, of that file, or of a model or GGUF file that `load` knows. ValueError, naming
    the nearest, for anything else.
    """
    name, known = _text("model", name), table("models")["models"]
    asked = name.strip().lower()
    for key, entry in known.items():
        if asked in (key.lower(), key.split("/")[1].lower()):
            return key, entry
    path = Path(source_of(name))
    if str(path) != str(Path(name)):  # an embedded or a fetched model, or a GGUF file's copy
        return name, _described(path)[1]
    if os.path.isdir(path) and not (path / "config.json").exists():
        raise ValueError(f"model={name!r}: this folder has no config.json")
    if os.path.exists(path):  # False for what is no path at all, where Path would raise
        return _described(path)
    told = f"is no folder, config.json or GGUF file, and not known{_nearest(name, known)}"
    raise ValueError(f"model={name[:100]!r} {told}")


def _described(path: Path) -> tuple[str, dict]:
    """The content of a config.json, and a name that shows what was left out."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        why = f"not a configuration that transformers reads: {first_line(error)}"
        raise ValueError(f"model={str(path)!r}: {why}") from error
    name, text = str(path), config.get_text_config(decoder=True)
    if text is not config:
        name += " (its text part)"
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        name += " (its weights counted in 16 bits, though they are quantized)"
    return name, describe(text)


def device_named(name: str) -> tuple[str, dict]:
    """(Name, entry) of a device, upper or lower case. ValueError, naming the nearest, for another."""
    name, known = _text("device", name), table("devices")["devices"]
    for key, entry in known.items():
        if name.strip().lower() == key.lower():
            return key, entry
    raise ValueError(f"device={name!r} is not known{_nearest(name, known)}")


def machine(device: dict) -> Machine:
    """A device as a `Machine` for rooflines."""
    return Machine(device["flops"], device["bandwidth"], device["link"])


def _text(parameter: str, name) -> str:
    """A name as it was given. ValueError for anything else."""
    if not isinstance(name, str | os.PathLike) or not str(name).strip():
        known = table(f"{parameter}s")[f"{parameter}s"]
        raise ValueError(f"{parameter}={shown(name)}: expected a name; known: {', '.join(known)}")
    return os.fspath(name)


def _nearest(name: str, known) -> str:
    """The names that begin or go on with this one, else the three nearest, else all of them."""
    lower = {part.lower(): key for key in known for part in (key.split("/")[-1], key)}
    having = [part for part in lower if name.lower() in part]
    near = having or difflib.get_close_matches(name.lower(), lower, n=4, cutoff=0.4)
    found = list(dict.fromkeys(lower[part] for part in near))[:3]
    return f", did you mean {' or '.join(found)}?" if found else f"; known: {', '.join(known)}"
