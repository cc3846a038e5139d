"""R-KV: drop tokens that later ones repeat, at regular intervals (Cai et al. 2025, arXiv 2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..attention import QUERY_BLOCK, capped
from ..named import named
from ..parameters import check_number, check_odd, check_whole
from .base import Keep, recent
from .snapkv import largest_near
from .state import KeepState, LastQueries

ALIKE = 0.5  # cosine above which one key repeats another


@named(
    "rkv",
    "What the last queries look at and later tokens do not say again, compressed while decoding as well.",
    "Cai et al. 2025", less="budget=0.4,window=3,every=4", look="green v --",
    technique="eviction by attention",
)  # fmt: skip
@dataclass(frozen=True)
class RKV(Keep):
    """Keep the tokens of a long output that the last queries attend to and later tokens do not repeat.

    Definition: a token's importance is the softmax weight that the last `window` queries give it among the
    tokens before them, with the group's largest scores, averaged over these queries; then the largest within
    `kernel` neighbours. Its redundancy is the softmax, over all tokens, of the mean cosine of its key with
    all keys, where every key spares the latest one that it resembles (cosine above 0.5). The tokens with the
    largest share * importance - (1 - share) * redundancy stay, and the last `window`.

    budget: tokens held (see `Keep`), plus up to `every` that have come since. window: queries that vote, and
    that stay. kernel: an odd number of tokens. share: of importance (0.07 in the official code, 0.1 in the
    paper).
    Deviations: the prompt is compressed too; a key that resembles no other spares none, while in the official
    code it spares the first token. The paper's claim is about reasoning models with outputs of thousands of
    tokens; kvlab measures no such outputs and so does not test it.
    ValueError for models that cache latents.
    State: `recent`, the last queries.
    """

    window: int = 8
    kernel: int = 7
    share: float = 0.07
    every: int | None = field(default=128, kw_only=True, repr=False)

    scores_keys = reads_queries = True
    states = ("recent",)

    def __post_init__(self):
        super().__post_init__()
        check_whole("window", self.window, 1, "queries")
        check_odd("kernel", self.kernel)
        check_number("share", self.share, lambda x: 0 <= x <= 1, "a part between 0 and 1")

    @property
    def last_queries(self) -> int:
        return self.window

    def start(self, layer) -> KeepState:
        state = super().start(layer)
        state.recent = LastQueries(self)
        return state

    def note(self, layer, query: Tensor) -> None:
        layer.state.recent.note(query, layer.slot_positions[:, 0, -query.shape[2] :])

    def by_rule(self, layer) -> Tensor:
        return recent(layer, self.window)

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        keys = layer.store.read(positions.device)[0].float()  # [batch, kv_heads, slots, head_dim]
        worth = self.share * self.importance(layer, keys) - (1 - self.share) * redundancy(keys, positions)
        return torch.where(self.held_by_rule(layer), 1 + positions, worth)  # nothing else exceeds 1

    def importance(self, layer, keys: Tensor) -> Tensor:
        """The attention of the last queries, `[batch, kv_heads, slots]`."""
        positions, last = layer.slot_positions, layer.state.recent
        hidden, asked = self.held_by_rule(layer) | (positions < 0), last.positions >= 0
        grouped = last.query.float().unflatten(1, (keys.shape[1], -1))  # [batch, h, group, window, d]
        scores = capped(grouped @ keys[:, :, None].transpose(3, 4) * layer.scaling, layer.softcap).amax(2)
        weights = scores.masked_fill(hidden[:, :, None], -torch.inf).softmax(-1) * asked[:, None, :, None]
        mean = weights.sum(2) / asked.sum(1).clamp(min=1)[:, None, None]
        mean = mean.masked_fill(hidden, 0.0)  # also where there is nothing before the window
        return largest_near(mean, positions, self.kernel)


def redundancy(keys: Tensor, positions: Tensor) -> Tensor:
    """How much other keys `[batch, kv_heads, slots, head_dim]` repeat each key, `[batch, kv_heads, slots]`,
    adding up to 1; position -1: an empty slot."""
    real = positions >= 0
    units = normalize(keys, dim=-1) * real[..., None]
    total, slots = torch.zeros_like(units[..., 0]), torch.arange(keys.shape[2], device=keys.device)
    for start in range(0, keys.shape[2], QUERY_BLOCK):
        mine = slots[start : start + QUERY_BLOCK]
        cosines = units[:, :, mine] @ units.transpose(2, 3)
        cosines = cosines.masked_fill(mine[:, None] == slots, 0.0)
        latest = (slots + 1).mul(cosines > ALIKE).amax(-1, keepdim=True) - 1  # -1: resembles none
        total += cosines.masked_fill(slots == latest, 0.0).sum(2)
    mean = total / real.sum(-1, keepdim=True)
    return mean.masked_fill(~real, -torch.inf).softmax(-1)
