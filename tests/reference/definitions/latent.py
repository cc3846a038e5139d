"""Latent: attention of one head over what its K and V are made of, in both ways (DeepSeek-V2, 2024, section
2.1)."""

import torch
from torch import Tensor

from .attention import attend, weights


def plain(
    query: Tensor, latents: Tensor, rotary: Tensor, up_key: Tensor, up_value: Tensor, scaling: float
) -> Tensor:
    """Make the head's K and V of all tokens, and attend: `[value_dim]`.

    query `[nope + width]`, latents `[tokens, rank]`, rotary `[tokens, width]`, up_key `[nope, rank]`,
    up_value `[value_dim, rank]`.
    """
    keys = [torch.cat([up_key @ latent, part]) for latent, part in zip(latents, rotary, strict=True)]
    values = [up_value @ latent for latent in latents]
    return attend(query, torch.stack(keys), torch.stack(values), scaling)


def absorbed(
    query: Tensor, latents: Tensor, rotary: Tensor, up_key: Tensor, up_value: Tensor, scaling: float
) -> Tensor:
    """The same without making them: the query is taken to the latents, and their mean to the value."""
    nope = len(up_key)
    asked = torch.cat([up_key.T @ query[:nope], query[nope:]])
    share = weights(asked, torch.cat([latents, rotary], dim=1), scaling)
    return up_value @ (share @ latents)
