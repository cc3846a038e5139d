"""The slots that close up: which of every head's tokens scores least, by compiled code."""

import pytest
import torch

from kvlab.fast import closing


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "uncompiled"])
def test_the_lowest_is_torchs(compiled):
    """Ties, infinities, NaN, empty slots and a single candidate."""
    torch.manual_seed(0)
    function = closing.lowest if compiled else closing.lowest.py_func
    for slots in (2, 3, 7, 64, 131) if compiled else (2, 3, 7):
        for _ in range(50):
            score = torch.randn(2, 3, slots).mul(3).round()
            score[torch.rand(2, 3, slots) < 0.1] = torch.finfo(torch.float32).max
            score[torch.rand(2, 3, slots) < 0.02] = torch.nan
            positions = torch.arange(slots, dtype=torch.int32).expand(2, 3, -1).clone()
            positions[torch.rand(2, 3, slots) < 0.2] = -1
            positions[..., -1] = slots
            out = (positions < 0) | (positions == slots)
            right = slots - 1 - score.masked_fill(out, torch.inf).flip(-1).argmin(-1)
            gone = torch.empty(2, 3, dtype=torch.int64)
            function(score.numpy(), positions.numpy(), gone.numpy())
            assert torch.equal(gone, right)
