"""Expected Attention: keep the tokens that later queries are expected to attend to (Devoto et al. 2025, arXiv
2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models import rotation_of
from ..named import named
from ..parameters import FEW, check_whole
from .base import Keep, first
from .state import KeepState


@named(
    "expected",
    "What later queries, expected to be like the prompt's, would attend to, and all tokens after it.",
    "Devoto et al. 2025", less="budget=0.4,sinks=2,future=30", look="purple d --",
    technique="eviction by expected queries",
)  # fmt: skip
@dataclass(frozen=True)
class ExpectedAttention(Keep):
    """After the prompt, predict the distribution of the next queries from the prompt's, and keep the tokens
    that they would attend to. No single query is used.

    Definition: the prompt's queries before RoPE, without those of the first `sinks` tokens, have a mean m and
    a covariance S in every head; both are rotated by R, the mean rotation of the next `future` positions. If
    queries are drawn from a Gaussian, a key's expected unnormalized weight is exp(k'Rm s + k'RSR'k s^2 / 2),
    s being the scale of scores. A token's score is its share of these weights among the tokens held, averaged
    over the query heads of a group, times the L2 norm of its value. The first `sinks` tokens stay and do not
    enter the score. Tokens written after the prompt all stay. Models without RoPE are refused.

    budget: tokens of the prompt held (see `Keep`). future: number of positions to average over (512 in
    kvpress, the authors' code). sinks: first tokens that stay (4 there).
    Deviation: as in kvpress, the prompt is compressed once; kvpress also lets heads share a budget, which is
    `adakv` here.
    State, while the prompt is open: `count` `[batch, 1]`, queries so far, `total` `[batch, heads, head_dim]`,
    their sum, `squares` `[batch, heads, head_dim, head_dim]`, the sum of their outer products, in fp64;
    `rotation`, how the layer rotates (`models.Rotation`; None: not at all).
    """

    future: int = 512
    sinks: int = 4

    once = reads_queries = True
    per_row, shared = ("count", "total", "squares"), ("rotation",)

    def __post_init__(self):
        super().__post_init__()
        check_whole("future", self.future, 1, "positions", most=FEW)

    def start(self, layer) -> KeepState:
        state = super().start(layer)
        state.rotation = rotation_of(layer)
        return state

    def note(self, layer, query: Tensor) -> None:
        state, at = layer.state, layer.slot_positions[:, :1, -query.shape[2] :]
        if state.rotation is not None:
            query = state.rotation.undo(query.float(), at.expand(query.shape[:3]))
        counted = at >= self.sinks
        query = query.double() * counted[..., None]
        new = counted.sum(-1), query.sum(2), query.transpose(2, 3) @ query
        for name, x in zip(("count", "total", "squares"), new, strict=True):
            setattr(state, name, x if getattr(state, name) is None else x + getattr(state, name))

    def score(self, layer) -> Tensor:
        positions, (mean, spread) = layer.slot_positions, self.expected(layer)
        keys, values = layer.store.read(positions.device)  # [batch, kv_heads, slots, head_dim]
        sinks = first(layer, self.sinks)
        group, keys = mean.shape[1] // keys.shape[1], keys.float()
        weight = 0.0
        for member in range(group):
            m, s = mean[:, member::group, :, None], spread[:, member::group]
            varied = ((keys @ s) * keys).sum(-1) * layer.scaling**2 / 2
            score = (keys @ m)[..., 0] * layer.scaling + varied
            weight = weight + score.masked_fill(sinks | (positions < 0), -torch.inf).softmax(-1) / group
        return (weight * values.float().norm(dim=-1)).masked_fill(sinks, torch.inf)

    def expected(self, layer) -> tuple[Tensor, Tensor]:
        """Mean `[batch, heads, head_dim]` and covariance `[batch, heads, head_dim, head_dim]` of the queries
        at the next positions."""
        state = layer.state
        count = state.count.clamp(min=1)[..., None]
        mean = state.total / count
        spread = state.squares / count[..., None] - mean[..., None] * mean[..., None, :]
        if (rotation := state.rotation) is not None:
            next_one = torch.tensor(layer.lengths, device=mean.device)[:, None]
            cos, sin = rotation.angles(next_one + torch.arange(self.future, device=mean.device))
            cos, sin = cos.mean(1)[:, None], sin.mean(1)[:, None]  # [batch, 1, pairs]
            mean = rotation.turn(mean, cos, sin)
            for _ in range(2):  # R S, and then R (R S)'
                spread = rotation.turn(spread.transpose(2, 3), cos[:, None], sin[:, None])
        return mean.float(), spread.float()

    def forget(self, state) -> None:
        if self.prompt_only:
            state.count = state.total = state.squares = None
