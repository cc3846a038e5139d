"""Rotated: what cannot be stored; its definition is in tests/reference."""

import math

import pytest
import torch
from tiny import started

from kvlab.store import Growing, Int, Rotated


@pytest.mark.parametrize("bad", [math.nan, math.inf, 5e5])
def test_what_cannot_be_stored_is_refused_by_name_or_replaced_and_counted(bad):
    """5e5 alone could be stored in int4 with fp16 scales, but not what a vector of it is turned to."""
    x = torch.ones(2, 3, 4, 16)
    x[1, 2, 3] = 3e5 if bad == 5e5 else x[1, 2, 3]
    x[1, 2, 3, 5] = bad
    with pytest.raises(ValueError, match=r"int4: KV head 2 holds (NaN or infinity|a value above)"):
        Rotated(Int(4)).encode(x)
    store = started(Growing(Rotated(Int(4, nonfinite="clip"))), 16)
    store.append(x, torch.ones_like(x))
    keys, _ = store.read(x.device)
    assert store.replaced >= 1 and torch.isfinite(keys).all() and torch.allclose(keys[0], x[0], rtol=0.01)
