"""Small profiles of tiny models, without which `duo` and `kvzap` could not be tried as the others are."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from transformers.cache_utils import DynamicLayer

from kvlab.calibrate import profile
from kvlab.models import ModelShape, layers_of
from kvlab.spec import name_of

# As SETTINGS in tests/tiny.py, for `profiled`.
SETTINGS = {
    "duo": (["duo:heads=1"], ["duo:heads=0.4", "duo:heads=0,every=3"]),
    "kvzap": (["kvzap:threshold=1e-300"], ["kvzap", "kvzap:every=3"]),
}
NEUTRAL = [spec for neutral, _ in SETTINGS.values() for spec in neutral]
LOSSY = [spec for _, lossy in SETTINGS.values() for spec in lossy]
SINKS, RECENT, THRESHOLD = 2, 5, 0.135


def write(path, kind: str, model, **about) -> str:
    """The file of a profile of this model with numbers drawn at random, the same every time: gates, or linear
    models that guess of about half of the tokens that they score less than the threshold."""
    shape, draw = ModelShape.of(model), torch.Generator().manual_seed(3)
    heads = sum(isinstance(layer, DynamicLayer) for layer in layers_of(model)), shape.kv_heads
    if kind == "duo":
        tensors, own = {"gates": torch.rand(heads, generator=draw)}, {"sinks": SINKS, "recent": RECENT}
    else:
        numbers = shape.kv_heads * (shape.head_dim + shape.value_dim)
        weight = torch.randn(*heads, numbers, generator=draw) * 0.3
        tensors = {"weight": weight, "bias": torch.randn(heads, generator=draw) * 0.3 - 2}
        own = {"threshold": THRESHOLD, "recent": RECENT}
    profile.write(path, kind, model, tensors, **own | about)
    return str(path)


def profiled(spec: str, model) -> str:
    """The text of a method with a profile of this model, where it wants one."""
    kind = name_of(spec)
    if kind not in SETTINGS:
        return spec
    name, _, rest = spec.partition(":")
    path = _folder() / f"{kind}-{profile.model_digest(model)}.safetensors"
    if not path.is_file():
        write(path, kind, model)
    return f"{name}:profile={path}" + (f",{rest}" if rest else "")


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvlab-profiles-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
