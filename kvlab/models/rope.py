"""RoPE: how a model rotates its keys and queries, found by trials, so that it can be undone (Su et al. 2021,
arXiv 2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..attention import as_it_was, recording
from ..devices import entry_of
from ..gather import gather_slots
from .remembered import Remembered
from .shape import ModelShape, is_latent

PROBED = 0, 1, 2, 7, 50, 300, 1000  # positions at which a model is tried, and one beyond its context
EXACT = 1e-4  # of a key's norm: what fp32 may differ by


@dataclass(frozen=True)
class Rotation:
    """How one layer rotates: at position p, pair i of channels turns by p * frequencies[i], and everything is
    multiplied by `scale`.

    frequencies `[pairs]`, fp32, radians per token; channels beyond the pairs are left alone. neighbours:
    whether a pair is channels 2i and 2i + 1, or i and i + pairs.
    """

    frequencies: Tensor
    neighbours: bool
    scale: float = 1.0

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[..., pairs]` of positions `[...]`, by the model's own fp32 arithmetic."""
        turned = positions.float()[..., None] * self.frequencies.to(positions.device)
        return turned.cos(), turned.sin()

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[..., head_dim]` with its pairs turned, cos and sin `[..., pairs]`."""
        pairs = self.frequencies.numel()
        part, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        one, other = part.unflatten(-1, (-1, 2)).unbind(-1) if self.neighbours else part.chunk(2, dim=-1)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        turned = one * cos - other * sin, other * cos + one * sin
        joined = torch.stack(turned, -1).flatten(-2) if self.neighbours else torch.cat(turned, -1)
        return torch.cat([joined, rest], dim=-1)

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys `[..., head_dim]` at positions `[...]` as they were before they were rotated."""
        cos, sin = self.angles(positions)
        return self.turn(x, cos, -sin) / self.scale

    def move(self, x: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Queries or keys `[..., head_dim]` at positions `old` `[...]` as they would be at `new`."""
        (c, s), (to_c, to_s) = self.angles(old), self.angles(new)
        return self.turn(x, to_c * c + to_s * s, to_s * c - to_c * s)


def renumbered(rotation: Rotation | None, keys: Tensor, positions: Tensor, slots: Tensor | None) -> Tensor:
    """Keys `[batch, kv_heads, n, head_dim]` as if the tokens held were consecutive and ended at the newest
    one's position: scores depend on distances alone.

    positions `[batch, kv_heads, held]` of all that is held, -1 for none; slots `[batch, kv_heads, n]`: those
    that the keys are of, None for all.
    """
    if rotation is None:
        return keys
    order = (positions >= 0).cumsum(-1)
    new = positions.amax(-1, keepdim=True) - order.amax(-1, keepdim=True) + order
    if slots is not None:
        positions, new = (gather_slots(at, slots) for at in (positions, new))
    return rotation.move(keys, positions, new)


class Switch:
    """The length at which a model begins to rotate the whole text by other frequencies (longrope), so that
    cached keys are of no use, and transformers' `generate` drops the cache.

    tokens: of the longest text on this side; None: it never does. beyond: whether the cached text is beyond
    it, None if not yet known.
    """

    def __init__(self, model):
        config, self.name, self.beyond = model.config.get_text_config(), type(model).__name__, None
        rope, original = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
        longrope = rope.get("rope_type") == "longrope" and hasattr(config, original)
        self.tokens: int | None = rope[original] if longrope else None

    def check(self, cache, ids: Tensor, positions: Tensor | None) -> None:
        """ValueError for a pass whose rows and cached tokens are not all on one side."""
        seen = cache.get_seq_length()
        lengths = [seen + ids.shape[1]] if positions is None else (positions.amax(-1) + 1).flatten().tolist()
        longer = self.check_lengths(lengths)
        before = max(cache.lengths) > self.tokens if seen and self.beyond is None else self.beyond
        if seen and before != longer:
            other = "what is cached is on one side and this token on the other"
            self.refuse(f"{other}: feed the whole text in one pass")
        self.beyond = longer

    def check_lengths(self, lengths: list[int]) -> bool | None:
        """Whether rows that end at these lengths are beyond it. ValueError where only some are."""
        if self.tokens is None:
            return None
        longer = {length > self.tokens for length in lengths}
        if len(longer) > 1:
            self.refuse(f"the rows of this batch end at {min(lengths)} to {max(lengths)}: feed those apart")
        return longer.pop()

    def refuse(self, why: str) -> NoReturn:
        """Raise the ValueError of a text that crosses it."""
        rotates = f"rotates texts of more than {self.tokens} tokens otherwise (longrope)"
        raise ValueError(f"{self.name} {rotates}, and {why}")


_found = Remembered()  # rotations, or why there are none


def rotations_of(model) -> list[Rotation | None]:
    """How every layer that attends rotates its keys (None: not at all), in order.

    No family is named: the model's frequencies are tried on single tokens at several positions. A token that
    sees only itself has the same keys everywhere, except for the rotation, in every layer. model: one that
    attends through kvlab (`prepare`). ValueError, one line, for a model that rotates no keys, or in a way
    that cannot be undone exactly.
    """
    found = _found.of(model)
    if not found:
        try:
            found["rotations"] = _rotations(model)
        except ValueError as error:
            found["why"] = str(error)
    if "why" in found:
        raise ValueError(found["why"])
    return found["rotations"]


def rotation_of(layer) -> Rotation | None:
    """How a layer of a cache rotates. ValueError as of `rotations_of`, and where layers were taken out."""
    found = rotations_of(layer.model)
    if layer.order >= len(found):
        raise ValueError(
            f"the model has {len(found)} layers that attend, its configuration more: set "
            "config.num_hidden_layers and each attention's layer_idx before make_cache"
        )
    return found[layer.order]


def _rotations(model) -> list[Rotation | None]:
    name = type(model).__name__
    if is_latent(model):
        raise ValueError(f"{name} caches latents, with what is rotated (RoPE) beside them")
    if Switch(model).tokens is not None:
        why = "by other frequencies where the text is long, in a way that cannot be undone exactly"
        raise ValueError(f"{name} rotates its keys {why} (RoPE)")
    candidates = list(_candidates(model))
    if not candidates:
        raise ValueError(f"{name} has no rotary embedding (RoPE)")
    context = ModelShape.of(model).context or PROBED[-1] + 1
    positions = [*(p for p in PROBED if p < context), 2 * context]
    positions = torch.tensor(positions, device=entry_of(model))
    found = []
    for order, keys in enumerate(_alone(model, positions)):
        still = torch.zeros_like(candidates[0].frequencies)
        kinds = [Rotation(still, False), *candidates]
        fits = next((kind for kind in kinds if _explains(kind, keys, positions)), None)
        if fits is None:
            why = "in a way that cannot be undone exactly"
            raise ValueError(f"{name} rotates the keys of layer {order} {why} (RoPE)")
        found.append(None if fits is kinds[0] else fits)
    if not any(found):
        raise ValueError(f"{name} rotates no keys (no RoPE)")
    return found


def _candidates(model):
    """Every set of frequencies that a module of the model holds, with both ways to pair channels."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name:
                continue
            scale = getattr(module, f"{name.removesuffix('inv_freq')}attention_scaling", None)
            scale = scale if isinstance(scale, float) else getattr(module, "attention_scaling", 1.0)
            frequencies = buffer.detach().float().flatten()
            yield from (Rotation(frequencies, neighbours, scale) for neighbours in (False, True))


@torch.no_grad()
def _alone(model, positions: Tensor) -> list[Tensor]:
    """Keys of every layer, `[3, positions, kv_heads, head_dim]`, of three tokens alone at each position."""
    size = ModelShape.of(model).vocabulary
    tokens = torch.tensor([size // 3, size // 2, size - 1], device=entry_of(model))
    ids = tokens.repeat_interleave(len(positions))[:, None]
    with recording() as layers, as_it_was(model):
        model(ids, position_ids=positions.repeat(len(tokens))[:, None], use_cache=False)
    return [layer.keys[:, :, 0].unflatten(0, (len(tokens), -1)) for layer in layers]


def _explains(kind: Rotation, keys: Tensor, positions: Tensor) -> bool:
    """Whether keys differ from those at position 0 by this rotation, and by nothing else."""
    if 2 * kind.frequencies.numel() > keys.shape[-1]:
        return False
    first = keys[:, :1].float().expand_as(keys)
    at = positions[None, :, None].expand(keys.shape[:-1])
    error = (kind.move(first, torch.zeros_like(at), at) - keys.float()).norm(dim=-1)
    exact = max(EXACT, 4 * torch.finfo(keys.dtype).eps)
    return bool((error <= exact * first.norm(dim=-1) + 1e-6).all())
