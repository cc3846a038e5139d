"""Quest: fetch the pages whose key bounds allow the largest scores (Tang et al. 2024, arXiv 2406.10774)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import capped, group_importance
from ..parameters import check_one_of, check_whole, check_within, resolve_budget
from ..policy import State
from .topk import TopK, most_important

FEWEST = 3  # the fewest pages that a step fetches, as in the official code


@dataclass(frozen=True)
class Quest(TopK):
    """Bound a query's scores in each page of tokens, and fetch the pages with the largest bounds.

    A page holds `page` tokens, counted from the row's first one. For every page and KV head, the device holds
    the smallest and the largest value of each channel of its keys, after RoPE and before a store rounds them.
    No key of a page can score more than sum over c of max(q_c min_c, q_c max_c). At every step the max(3,
    budget / page) pages with the largest bounds are fetched, whole; the newest token is always attended.
    Tokens of a page that a keep or a window dropped still count in its bounds.

    budget: tokens fetched at most per step and head, rounded down to pages (see `TopK`; 1: everything). page:
    tokens of one. full_layers: first layers that fetch everything (2 in the paper). digest: `bounds`, or
    `centre`: instead of a channel's smallest and largest value, the middle between them minus and plus the
    mean distance of the page's keys from it. That is no bound, but a single outlying key no longer decides
    for the whole page (ArkVale, Chen et al. 2024, NeurIPS, with pages of 32 tokens; without its permanent
    pages, the first two and the last two).
    Deviation: the paper ranks pages for every query head; here the heads of a group together fetch the pages
    with the largest weight, the mean over these heads of the softmax over pages of their scaled bounds
    (`attention.group_importance`; Yuan et al. 2025, arXiv 2502.11089, equation 10, sums likewise).
    State: `low` and `high`, the bounds, `[batch, kv_heads, pages, head_dim]` each, in the keys' own dtype;
    with `centre` also `open` `[batch, kv_heads, page, head_dim]` and `open_at` `[batch, page]`, the keys of a
    row's last page while it fills, and their positions (-1: none).
    """

    full_layers: int = 2
    page: int = 16
    digest: str = "bounds"

    def __post_init__(self):
        super().__post_init__()
        check_one_of("digest", self.digest, ("bounds", "centre"))
        check_whole("page", self.page, 1)

    def cost(self, use) -> tuple[float, float]:
        check_within("page", self.page, use.stated)
        return super().cost(use)

    def chosen_cost(self, use, budget: float) -> tuple[float, float]:
        """The smallest pages. The first may have lost tokens to a window; the last is not full, and its
        newest token is already on the device."""
        page, first = self.page, use.tokens - use.held
        bounds = -(-use.tokens // page) * use.kind["heads"] * 2 * use.kind["key"] * 2
        there = use.tokens // page - first // page + 1
        count = there if budget == math.inf else self.pages(budget)
        if count >= there:
            return use.held, bounds
        return page - first % page + use.tokens % page + (count - 2) * page, bounds

    def start(self, layer) -> State:
        check_within("page", self.page, layer.shape.context)
        return QuestState(self, self)

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        self.append(layer, keys)

    def append(self, layer, keys: Tensor) -> None:
        if self.whole(layer.index) or not max(layer.lengths):  # padding alone has no page
            return
        first, note = layer.slots - keys.shape[2], self._centre if self.digest == "centre" else self._bound
        if first and layer.state.low is None:  # after a crop, the remaining keys are read again
            left, _ = layer.store.read(keys.device)
            note(layer, left[:, :, :first], 0)
        note(layer, keys, first)

    def _bound(self, layer, keys: Tensor, first: int) -> None:
        """Keys `[batch, kv_heads, tokens, head_dim]` in the slots from `first` on join their pages."""
        state, count = layer.state, -(-max(layer.lengths) // self.page)
        positions = layer.slot_positions[:, :, first : first + keys.shape[2], None].long()
        padding, pages = positions < 0, (positions.clamp(min=0) // self.page).expand_as(keys)
        limits = torch.finfo(keys.dtype)  # finite: a bound of nothing times 0 is 0
        for name, how, nothing in (("low", "amin", limits.max), ("high", "amax", limits.min)):
            bounds = getattr(state, name)
            new = count - (0 if bounds is None else bounds.shape[2])
            if new > 0:
                room = keys.new_full((*keys.shape[:2], new, keys.shape[3]), nothing)
                bounds = room if bounds is None else torch.cat([bounds, room], dim=2)
            setattr(state, name, bounds.scatter_reduce(2, pages, keys.masked_fill(padding, nothing), how))

    def _centre(self, layer, keys: Tensor, first: int) -> None:
        """As `_bound`, for the digest `centre`: pages that get tokens are computed again from all their
        keys."""
        state, count = layer.state, -(-max(layer.lengths) // self.page)
        count = max(count, 0 if state.low is None else state.low.shape[2])  # the longest row may have left
        at = layer.slot_positions[:, 0, first : first + keys.shape[2]].long()  # [batch, tokens]
        if state.open is not None:
            keys, at = torch.cat([state.open, keys], 2), torch.cat([state.open_at, at], 1)
        batch, heads, _, width = keys.shape
        real, wide = (at >= 0)[:, None, :, None], keys.to(torch.promote_types(keys.dtype, torch.float32))
        pages = (at.clamp(min=0) // self.page)[:, None, :, None].expand(-1, heads, -1, width)
        none = wide.new_zeros(batch, heads, count, width)
        held = none.scatter_add(2, pages, real.expand_as(wide).to(wide.dtype))
        ends = (
            none.scatter_reduce(2, pages, wide.masked_fill(~real, end), how, include_self=False)
            for how, end in (("amin", torch.inf), ("amax", -torch.inf))
        )
        middle = (sum(ends) / 2).masked_fill(held == 0, 0.0)
        away = (wide - middle.gather(2, pages)).abs() * real
        spread = none.scatter_add(2, pages, away) / held.clamp(min=1)
        for name, digest in (("low", middle - spread), ("high", middle + spread)):
            old = none[:, :, :0] if getattr(state, name) is None else getattr(state, name)
            before = torch.cat([old, none[:, :, old.shape[2] :]], 2)
            setattr(state, name, torch.where(held > 0, digest, before).to(keys.dtype))
        newest = at.argsort(dim=1)[:, -self.page :]
        begun = (at.amax(1, keepdim=True) + 1) // self.page * self.page
        state.open_at = at.gather(1, newest)
        state.open_at = state.open_at.masked_fill(state.open_at < begun, -1)
        state.open = keys.gather(2, newest[:, None, :, None].expand(-1, heads, -1, width))

    def select(self, layer, query: Tensor) -> Tensor | None:
        if self.whole(layer.index) or self.budget == 1 or layer.slots < 2:
            return None
        slots = slots_of_pages(layer, layer.state.low.shape[2], self.page, query.device)
        scores = capped(self.bounds(layer.state, query).float() * layer.scaling, layer.softcap)
        empty = (slots < 0).all(-1).repeat_interleave(scores.shape[1] // slots.shape[1], dim=1)
        scores = scores.masked_fill(empty, -torch.inf)
        importance = group_importance(scores, layer.kv_heads, layer.sinks)
        pages = most_important(importance, self.counts(layer))
        chosen = pages.clamp(min=0)[..., None].expand(-1, -1, -1, self.page)
        slots = slots.expand(len(pages), layer.kv_heads, -1, -1).gather(2, chosen)
        newest = slots == layer.slots - 1  # already on the device
        return slots.masked_fill(newest | (pages < 0)[..., None], -1).flatten(2)

    def bounds(self, state: State, query: Tensor) -> Tensor:
        """The upper bound of every query head's scores in each page, before scaling, `[batch, heads,
        pages]`."""
        grouped = query[:, :, 0].to(state.low.dtype).unflatten(1, (state.low.shape[1], -1))
        upper = grouped.clamp(min=0) @ state.high.transpose(2, 3)
        return (upper + grouped.clamp(max=0) @ state.low.transpose(2, 3)).flatten(1, 2)

    def counts(self, layer) -> list[int]:
        """The number of pages that each row fetches."""
        tokens = [min(seen, layer.local or seen) for seen in layer.lengths]
        return [self.pages(resolve_budget(self.budget, seen)) for seen in tokens]

    def pages(self, tokens: int) -> int:
        """The number of pages that a step fetches for a budget of tokens."""
        return max(FEWEST, tokens // self.page)


def slots_of_pages(layer, pages: int, page: int, device: torch.device) -> Tensor:
    """The slots of a layer's first pages, `[batch or 1, kv_heads or 1, pages, page]`, -1 where no token is
    held; page: tokens, counted from the row's first one."""
    room, positions = pages * page, layer.some_empty
    if positions is None:  # slot j holds token j
        slots = torch.arange(room, device=device)
        slots = slots.masked_fill(slots >= layer.slots, -1)[None, None]
    else:
        held = torch.arange(positions.shape[2], device=positions.device).expand(positions.shape)
        slots = held.new_full((*positions.shape[:2], room + 1), -1)
        slots.scatter_(2, positions.long().where((positions >= 0) & (positions < room), room), held)
        slots = slots[..., :room]
    return slots.unflatten(2, (-1, page))


class QuestState(State):
    """See `Quest`. Pages do not follow slots: after a crop they are bounded again, which a store that rounds
    keys refuses."""

    bounds_keys = True
    per_row = ("low", "high", "open", "open_at")

    def crop(self, length: int) -> None:
        super().crop(length)
        self.low = self.high = self.open = self.open_at = None
