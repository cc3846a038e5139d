"""LagKV: a channel that does not vary; its definition is in tests/reference."""

import torch

from kvlab.keep.lagkv import weights


def test_a_channel_that_does_not_vary_says_nothing():
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0))
    x[:, 4:, 2] = 1.0
    assert weights(x, 4).isfinite().all()
    rest = x[..., [0, 1, 3, 4, 5]]
    assert not torch.equal(weights(x, 4), weights(rest, 4))
    assert torch.allclose(weights(x, 4).sum(-1), torch.ones(1, 1))
