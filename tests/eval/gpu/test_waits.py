"""No decode step of a method on a device waits for the device: a captured step may not, and an eager one
would stand still. Here, on a CPU, by the names of the functions that would wait."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

import kvlab
from eval.gpu import models, right
from kvlab import late
from kvlab.measure.machines import fill_random

WAITS = (  # what makes the host wait for a GPU, where the tensor is on one
    "item", "tolist", "nonzero", "equal", "allclose", "masked_select", "unique",
    "__bool__", "__int__", "__float__", "__index__", "argwhere",
)  # fmt: skip


class Waits(TorchFunctionMode):
    """Counts calls for which the host would wait, by name; a mask as an index counts."""

    def __init__(self):
        super().__init__()
        self.found: Counter = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in WAITS:
            self.found[name.strip("_")] += 1
        elif name == "tensor" and (kwargs or {}).get("device") is not None:
            self.found["tensor of a list"] += 1
        elif name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool:
            self.found["index by a mask"] += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing_late():
    """Values that cannot be stored are refused as they are on a GPU, where asking at once would wait."""
    before, late.far = late.far, lambda x: True
    try:
        yield
    finally:
        late.far = before


@pytest.mark.parametrize("method", right.METHODS)
@torch.no_grad()
def test_no_decode_step_waits_for_the_device(bench, method):
    """A method that offloads waits by what it is."""
    model = right.small_model(bench.device, torch.float32)
    cache, ids = kvlab.make_cache(model, method), models.next_ids(bench, 2)
    fill_random(model, cache, 100, 2)
    for _ in range(2):
        model(ids, past_key_values=cache)
    with Waits() as named, refusing_late():
        model(ids, past_key_values=cache)
    if cache.attending[0].place.on_host:
        pytest.skip("it waits for its link")
    assert not named.found
