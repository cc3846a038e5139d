"""Saved: a cache as a file, for a context that is compressed once and used later, in another process.

The file is a safetensors file: the layers' tensors and, in its metadata, the rest of their memory as JSON,
with a digest of both. It contains no code.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import kind_and_line
from .models.shape import other_model
from .parameters import check_file, check_kind, from_json
from .policy import Policy, State
from .scratch import written_whole

FORMAT = "5"  # of the file; another one is refused
PARTS = ("keep", "store", "place", "table")  # of a layer
OF_LAYER = ("local", "moved_bytes", "in_prompt", "is_initialized", "scored", "dtype", "autocast")
OF_GIVEN = ("scaling", "softcap")  # of the last pass
SCALARS = (bool, int, float, str, type(None))
NOTES = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "auto_map")
LARGEST = 2**53  # of whole numbers that also fit into a tensor
PIECE = 4 * 2**20  # numbers of a weight copied to the host at a time


def save(cache, path: str | Path) -> None:
    """See `KVCache.save`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_kind("path", path, str | Path, "a path")
    if cache.model is None:
        raise ValueError(other_model(None))
    if cache.spec is None:
        raise ValueError("save: this cache was not made by kvlab.make_cache from a method's name")
    if "link" in cache.spec.parameters or not getattr(cache, "fillable", False):
        raise ValueError(
            f"save: a cache of {cache.spec.text!r} on this model does not hold just K and V of its layers"
        )
    cache.check_whole()
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
        check_file(path)
        with written_whole(path) as part:
            save_file(written.tensors, part, metadata=about)
    except (SafetensorError, OSError, ValueError) as error:
        said = str(error).removeprefix("Error while serializing: ")
        raise ValueError(f"path={str(path)!r}: no cache can be written there ({said})") from error


def opened(path: str | Path, model) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(a file's metadata about its cache, its tensors). Raises ValueError for a file that is no cache, was
    saved for another model or by another version of kvlab, or was changed since."""
    check_kind("path", path, str | Path, "a path")
    about, tensors = inside(path, f"{path}: no cache can be read from it")
    if not {"layers", "method", "tokens"} <= about.keys():
        raise ValueError(f"{path} holds no cache of kvlab's")
    if about.get("format") != FORMAT:
        told = f"format {about.get('format')}, but this version of kvlab reads format {FORMAT}"
        raise ValueError(f"{path} was saved in {told}: save the cache again")
    if about.get("model") != model_digest(model):
        raise ValueError(f"{path} was saved for another model: its digest is {about.get('model')}")
    if about.get("digest") != contents_digest(about, tensors):
        raise ValueError(f"{path} is damaged: what it holds is not what was saved; save the cache again")
    for word in re.split("[:,=]", re.sub("profile=[^,]*", "", about.get("method", ""))):
        module = word.strip().rpartition(".")[0]
        if module.replace(".", "").isidentifier() and module not in sys.modules:
            raise ValueError(f"{path} names {word}: import {module} first, since no file imports a module")
    return about, tensors


def inside(path: str | Path, why: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a safetensors file. ValueError that begins with `why` for any other
    file."""
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path)
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # and tensors of their own: what is mapped changes with the file
            return file.metadata() or {}, {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{why} ({' '.join(str(error).split())})") from error


def fill(cache, about: dict[str, str], tensors: dict[str, Tensor], path: str | Path) -> None:
    """Write the result of `opened` into a fresh cache of the same method. Raises ValueError for anything but
    a cache of that method on this model, so that no file can make a later step fail."""
    try:
        read = Read(tensors, cache.model.device)
        layers = from_json(about["layers"], parse_constant=_constant)
        for layer, found in zip(cache.layers, layers, strict=True):
            _same(found, (*OF_LAYER, *OF_GIVEN, *PARTS), "a layer")
            for name in OF_LAYER:
                setattr(layer, name, alike(name, read.decode(found[name]), getattr(layer, name)))
            given = {name: alike(name, found[name], 1.0) for name in OF_GIVEN}
            layer.given = replace(layer.given, **given)
            for part in PARTS:
                read.restore(getattr(layer, part), found[part])
            check_layer(layer, int(about["tokens"]))
        _same(read.placed, tensors, "the file")
        cache.stats()
    except Exception as error:
        raise ValueError(
            f"{path} holds no cache of {cache.spec.text!r} on this model ({kind_and_line(error)})"
        ) from error


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def _same(found, wanted, what: str) -> None:
    """ValueError if the names differ from those wanted."""
    if odd := {*found} ^ {*wanted}:
        raise ValueError(f"{what} has {sorted(found)}, where {sorted(odd)} is too much or missing")


def alike(name: str, value, fresh, said: bool = False):
    """A file's value for one that a fresh cache has. ValueError for another type, and for any other value of
    what is `said` by the method's name."""
    number = isinstance(value, int | float) and isinstance(fresh, int | float)
    whole = isinstance(fresh, bool) == isinstance(value, bool) and (value is not None)
    nothing = value is None and not isinstance(fresh, list | tuple)
    kind = nothing or fresh is None or (number and whole) or isinstance(value, type(fresh))
    if kind and not (said and isinstance(value, SCALARS) and value != fresh):
        return value
    raise ValueError(f"{name} is {value!r}, where a fresh cache has {fresh!r}")


def check_layer(layer, tokens: int) -> None:
    """ValueError for a layer whose parts do not fit together, or that holds NaN or infinity."""
    table, batch = layer.table, len(layer.lengths)
    counts = (table.count, table.seen, *table.lengths, *table.rows_held)
    if any(not isinstance(n, int) or n < 0 for n in counts) or table.seen != tokens:
        raise ValueError(f"tokens {counts} are not those of {tokens}")
    if type(table.kv_heads) is not int or table.kv_heads != layer.kv_heads:
        raise ValueError(f"it has {table.kv_heads} KV heads, where the model has {layer.kv_heads}")
    if len(table.rows_held) != batch or any(n > tokens for n in (table.count, *table.lengths)):
        raise ValueError(f"its rows have seen {table.lengths} tokens and hold {table.rows_held}")
    if layer.in_prompt != (not batch):
        raise ValueError(f"in_prompt is {layer.in_prompt}")
    if not batch:
        return
    if not isinstance(layer.dtype, torch.dtype) or not layer.dtype.is_floating_point:
        raise ValueError(f"its numbers are of {layer.dtype}")
    shape = batch, layer.kv_heads, table.count
    if table.moved is not None:
        fits = table.moved.dtype == torch.int32 and table.moved.shape[::2] == shape[::2]
        if not fits or table.moved.shape[1] not in (1, shape[1]) or int(table.moved.max()) >= tokens:
            raise ValueError("its positions are none of its tokens'")
    ends = [max(row) + 1 for row in pad(table.positions, (1, 0), value=-1).flatten(1).tolist()]
    fit = all(n == end or (n > end and not table.newest) for n, end in zip(table.lengths, ends, strict=True))
    if not fit or (table.positions >= 0).sum(-1).amax(-1).tolist() != table.rows_held:
        raise ValueError(f"its rows have seen {table.lengths} tokens and hold {table.rows_held}")
    for state in (layer.keep, layer.store, layer.place):
        if odd := state.odd(*shape):
            raise ValueError(odd)
    read = layer.store.read(layer.model.device)
    for x, width in zip(read, (layer.shape.head_dim, layer.shape.value_dim), strict=True):
        if x.shape[:3] != shape or x.shape[3] not in (0, width):  # none if they are rebuilt
            raise ValueError(f"it holds K or V of shape {tuple(x.shape)}")
        if x.shape[3] and x.dtype != layer.dtype:
            raise ValueError(f"it holds K or V of {x.dtype}, where the passes were in {layer.dtype}")
    layer.try_step()


class Written:
    """Values as JSON, and the tensors among them; `host`: the tensors now being written stay on the host."""

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}  # by the tensor's id
        self.alive: list[Tensor] = []  # an id is unique while its tensor lives
        self.host = False

    def attributes(self, thing) -> dict:
        """An object's memory, without what a fresh one has too: parameters and shared objects."""
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
        there = dict(thing.contents() if isinstance(thing, State) else vars(thing))
        late = (name for name in attributes if isinstance(getattr(type(thing), name, ...), SCALARS))
        there |= {name: getattr(thing, name) for name in late}  # said of the class, until it changes
        _same(attributes, there, type(thing).__name__)
        found = {
            name: alike(name, self.decode(value, there[name]), there[name], isinstance(thing, Policy))
            for name, value in attributes.items()
        }
        if isinstance(thing, State):
            thing.refill(found)
        else:
            vars(thing).update(found)

    def decode(self, value, there=None):
        if isinstance(value, SCALARS):
            return value
        ((kind, inside), *_) = value.items()
        if kind == "tensor":
            if not isinstance(value["host"], bool):
                raise ValueError(f"host is {value['host']!r}")
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
        whole = lambda item: isinstance(item, int) and 0 <= item <= LARGEST
        if not all(whole(item) if kind == "list" else isinstance(item, Tensor) for item in items):
            raise ValueError(f"a {kind} holds {items[:3]}")
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
        here = isinstance(weight, Tensor) and not weight.is_meta  # else packed by torch.ao, or offloaded
        if not here or hasattr(weight, "full_tensor"):  # a DTensor
            raise ValueError(
                "a model whose weights are packed, split among processes or on disk has no digest by which a "
                "profile or a saved cache would know it: load it whole and as it was stored"
            )
        found = 0
        for piece in weight.detach().flatten().split(PIECE):
            found = zlib.crc32(piece.cpu().view(torch.uint8).numpy(), found)
        total.update(f"{name} {tuple(weight.shape)} {weight.dtype} {found}".encode())
    return total.hexdigest()[:16]


def settings(model) -> dict:
    """The settings of a model that change the computation: all except those of every configuration (labels,
    dtype, versions), names with an underscore (paths, implementations), and `NOTES`."""
    from transformers import PreTrainedConfig

    notes = {*PreTrainedConfig().to_dict(), *NOTES} - {"model_type"}

    def read(value):
        if isinstance(value, dict):
            named = {str(key): one for key, one in value.items()}
            return {key: read(one) for key, one in named.items() if key not in notes and key[:1] != "_"}
        return [read(one) for one in value] if isinstance(value, list | tuple) else value

    return read(model.config.to_dict())
