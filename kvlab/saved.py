"""Saved: a cache as a file, for a context that is compressed once and asked later, in another process.

The file is a safetensors file: the tensors that the layers hold, and as its metadata what else they remember,
as JSON, with a digest of both. Nothing in it is code.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from .parameters import check_kind
from .policy import State

FORMAT = "3"  # of the file; another one is refused
PARTS = ("keep", "store", "place", "table")  # of a layer
OF_LAYER = ("local", "moved_bytes", "in_prompt", "is_initialized", "scored")
OF_GIVEN = ("scaling", "softcap")  # of the last pass
SCALARS = (bool, int, float, str, type(None))
NOTES = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "auto_map")
PIECE = 4 * 2**20  # numbers of a weight that are brought to the host at a time


def save(cache, path: str | Path) -> None:
    """See `KVCache.save`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_kind("path", path, str | Path, "a path")
    if cache.spec is None:
        raise ValueError("save: this cache was not made by kvlab.make_cache from a method's name")
    if "link" in cache.spec.parameters or not getattr(cache, "fillable", False):
        raise ValueError(
            f"save: a cache of {cache.spec.text!r} on this model holds more than K and V of its layers"
        )
    if cache.prefilling:
        raise ValueError("save: the prompt in this cache has not ended")
    written = Written()
    layers = []
    for layer in cache.layers:
        layer.place.flush(layer)
        layer.place.commit(layer)
        found = {name: written.encode(getattr(layer, name)) for name in (*OF_LAYER, *OF_GIVEN)}
        for part in PARTS:
            written.host = part == "store" and layer.place.on_host
            found[part] = written.attributes(getattr(layer, part))
        layers.append(found)
    about = {
        "format": FORMAT,
        "method": cache.spec.text,
        "model": model_digest(cache.model),
        "tokens": str(cache.get_seq_length()),
        "versions": json.dumps({name: metadata.version(name) for name in ("kvlab", "torch", "transformers")}),
        "layers": json.dumps(layers),
    }
    about["digest"] = contents_digest(about, written.tensors)
    try:
        save_file(written.tensors, path, metadata=about)
    except (SafetensorError, OSError) as error:
        said = str(error).removeprefix("Error while serializing: ")
        raise ValueError(f"path={str(path)!r}: no cache can be written there ({said})") from error


def opened(path: str | Path, model) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(what a file says about its cache, its tensors). Raises ValueError for a file that is none, that was
    saved for another model, or by another version of kvlab, or that is not as it was written."""
    from safetensors import SafetensorError, safe_open

    check_kind("path", path, str | Path, "a path")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: no cache can be read from it ({error})") from error
    if "layers" not in about:
        raise ValueError(f"{path} holds no cache of kvlab's")
    if about.get("format") != FORMAT:
        told = f"format {about.get('format')}, but this version of kvlab reads format {FORMAT}"
        raise ValueError(f"{path} was saved in {told}: save the cache again")
    if about["model"] != model_digest(model):
        raise ValueError(f"{path} was saved for another model: its digest is {about['model']}")
    if about.get("digest") != contents_digest(about, tensors):
        raise ValueError(f"{path} is damaged: what it holds is not what was saved; save the cache again")
    return about, tensors


def fill(cache, about: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write what `opened` has read into a fresh cache of the same method."""
    read = Read(tensors, cache.model.device)
    for layer, found in zip(cache.layers, json.loads(about["layers"]), strict=True):
        for name in OF_LAYER:
            setattr(layer, name, read.decode(found[name]))
        layer.given = replace(layer.given, **{name: found[name] for name in OF_GIVEN})
        for part in PARTS:
            read.restore(getattr(layer, part), found[part])


class Written:
    """Values as JSON, and the tensors among them; `host`: those of now stay on the host."""

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}  # by the tensor's id
        self.alive: list[Tensor] = []  # an id is one tensor's as long as it lives
        self.host = False

    def attributes(self, thing) -> dict:
        """What an object remembers, but for what a fresh one has too: parameters, and what is shared."""
        values = thing.contents() if isinstance(thing, State) else vars(thing)
        return {name: self.encode(value) for name, value in values.items()}

    def encode(self, value):
        if isinstance(value, SCALARS):
            return value
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.alive.append(value)
                self.names[id(value)] = name = f"t{len(self.tensors)}"
                self.tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
            return {"tensor": self.names[id(value)], "host": self.host}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [self.encode(item) for item in value]}
        if isinstance(value, State) or type(value).__module__.startswith("kvlab."):
            return {"attributes": self.attributes(value)}
        raise ValueError(f"save: a {type(value).__name__} in the state of a method cannot be saved")


class Read:
    """The way back: `restore` writes into what a fresh cache has."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device):
        self.tensors, self.device = tensors, device
        self.placed: dict[str, Tensor] = {}

    def restore(self, thing, attributes: dict) -> None:
        found = {name: self.decode(value, getattr(thing, name, None)) for name, value in attributes.items()}
        if isinstance(thing, State):
            thing.refill(found)
        else:
            vars(thing).update(found)

    def decode(self, value, there=None):
        if isinstance(value, SCALARS):
            return value
        ((kind, inside), *_) = value.items()
        if kind == "tensor":
            if inside not in self.placed:
                self.placed[inside] = self.tensors[inside].to("cpu" if value["host"] else self.device)
            return self.placed[inside]
        if kind == "dtype":
            return getattr(torch, inside)
        if kind == "device":
            return self.device
        if kind == "attributes":
            self.restore(there, inside)
            return there
        items = [self.decode(item) for item in inside]
        return items if kind == "list" else tuple(items)


def contents_digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """Sixteen hex digits of all that a file holds, every byte of its tensors among it: it takes as long as
    reading the file once."""
    total = hashlib.sha256(repr(sorted((name, about[name]) for name in about if name != "digest")).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def model_digest(model) -> str:
    """Sixteen hex digits of what a model computes: its class, its `settings`, and of every weight its name,
    shape, dtype and the CRC-32 of all its bytes, which is the fastest sum that the standard library has (half
    a GB takes 0.1 s) and misses one change in 2**32. ValueError where some weights are not all here."""
    about = json.dumps([type(model).__name__, settings(model)], sort_keys=True, default=str)
    total = hashlib.sha256(about.encode())
    for name, weight in sorted(model.state_dict().items()):
        if weight.is_meta or hasattr(weight, "full_tensor"):  # offloaded, or a DTensor
            raise ValueError(
                "a model whose weights are split among processes, or lie on disk, has no digest by which a "
                "profile or a saved cache would know it: load it whole"
            )
        found = 0
        for piece in weight.detach().flatten().split(PIECE):
            found = zlib.crc32(piece.cpu().view(torch.uint8).numpy(), found)
        total.update(f"{name} {tuple(weight.shape)} {weight.dtype} {found}".encode())
    return total.hexdigest()[:16]


def settings(model) -> dict:
    """What of a model's configuration changes the computation: all but what every configuration has (labels,
    dtype, versions), what is named with an underscore (paths, implementations), and `NOTES`."""
    from transformers import PreTrainedConfig

    notes = {*PreTrainedConfig().to_dict(), *NOTES} - {"model_type"}

    def read(value):
        if isinstance(value, dict):
            named = {str(key): one for key, one in value.items()}
            return {key: read(one) for key, one in named.items() if key not in notes and key[:1] != "_"}
        return [read(one) for one in value] if isinstance(value, list | tuple) else value

    return read(model.config.to_dict())
