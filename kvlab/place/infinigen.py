"""InfiniGen: predict one layer ahead which tokens attention will need (Lee et al. 2024, OSDI)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import group_importance, true_scores
from ..calibrate.fold import is_folded, query_projection
from ..calibrate.skew import skew
from ..models import Narrow
from ..parameters import check_number, check_one_of
from ..policy import State
from ..ranks import all_heads
from ..store.growing import Growing
from .topk import TopK, most_important


def _sum(queried: Tensor, keyed: Tensor, count: int) -> Tensor:
    return (queried + keyed).topk(count, dim=-1).indices


def _first_query(queried: Tensor, keyed: Tensor, count: int) -> Tensor:
    return queried[:1].topk(count, dim=-1).indices.expand(len(queried), -1, -1)


def _union(queried: Tensor, keyed: Tensor, count: int) -> Tensor:
    chosen = torch.zeros_like(queried)
    for size in (queried, keyed):
        chosen.scatter_(-1, size.topk(count, dim=-1).indices, 1.0)
    most = int(chosen.sum(-1).max())
    columns = chosen.topk(most, dim=-1).indices
    return columns.masked_fill(chosen.gather(-1, columns) == 0, -1)


@dataclass(frozen=True)
class Variant:
    """Differences between the paper and the official code (github.com/snu-comparch/InfiniGen).

    columns: chosen from the sums over the prompt of |Q~| and |K~|, `[batch, kv_heads, head_dim]` each.
    official: int(ratio * d) columns, while the paper's ratio is rounded; a rehearsal on the previous layer's
    normed input; one count of tokens for the whole batch, the mean over all rows and heads rounded down.
    within(score, threshold): whether a token is counted. one_threshold: all use that of the first row's first
    head.
    """

    columns: Callable[[Tensor, Tensor, int], Tensor]
    official: bool = True
    within: Callable[[Tensor, Tensor], Tensor] = torch.gt
    one_threshold: bool = False


VARIANTS = {
    "paper": Variant(_sum, official=False),
    "official-speed": Variant(_first_query),  # speedup/infinigen
    "official-accuracy": Variant(_union, within=torch.ge),  # accuracy/src/modeling_opt_ours.py
    "official-accuracy-llama": Variant(_union, within=torch.ge, one_threshold=True),  # modeling_llama_ours.py
}


@dataclass(frozen=True)
class InfiniGen(TopK):
    """Rehearse layer i's attention at layer i-1 on a few columns of K, and fetch the tokens that seem
    important.

    The inputs of successive blocks are similar, so LN_i(input of block i-1) W_q is close to layer i's query.
    After skewing (`calibrate/skew.py`) a few columns of Q and K carry most of the score; after the prefill
    those with the largest sum over the prompt of |Q~| + |K~| are chosen per row and head, and copied into a
    partial key cache on the device. At every step the guessed scores pick n tokens,
    n = min(cap, mean over the heads of #{scores > max - alpha}), the same n for all heads of a row, each
    head its own top n, and the mean is rounded up. The first layers fetch everything; the newest token is
    always attended. After `fold`, the model's queries and keys are already skewed; in other models they are
    rotated at run time (the same numbers; the matrices belong to the model and are not counted as cache
    bytes).

    budget: tokens fetched at most per step and head (see `TopK`). full_layers: first layers that fetch
    everything (2 in the paper). alpha: how far below the head's best guessed score (after scaling) a token's
    may be (the paper: 4 for OPT, 5 for Llama-2; inf: cap alone decides). ratio: share of the head dimension
    used for the guess (0.3 in the paper). Models differ: on all three real models tried, 4 and 0.3 lose
    answers that 5 and 0.5 do not (docs/results.md, `kvlab gate`).
    variant: "paper", or a form of the official code (`VARIANTS`): "official-speed" takes the columns with the
    largest |Q~| of the batch's first row, "official-accuracy" the union of two top-k's, by |Q~| and by |K~|,
    and "official-accuracy-llama" also one threshold, that of the first head of the first row, for all heads
    (docs/offloading.md has the list, and what no variant follows).
    State: `columns` `[batch, kv_heads, r]`, the chosen columns (-1: one fewer); `partial`, the partial key
    cache; `skew`, the layer's matrices A (None: nothing to rotate); while more of the prompt may come,
    `sums` of |Q~| and |K~| so far, `[batch, kv_heads, d]` each; `guessed`, slots to fetch at the coming step.
    In a folded model: `projection`, the layer's to its queries; `asks`, its rows that the columns need
    (weights, and not counted either).
    """

    full_layers: int = 2
    alpha: float = 4.0
    ratio: float = 0.3
    variant: str = "paper"

    speculates = at_most = True

    def __init__(self, budget=0.2, alpha: float = alpha, ratio: float = ratio, full_layers: int = full_layers,
                 variant: str = "paper"):  # fmt: skip
        names = ("budget", "full_layers", "alpha", "ratio", "variant")
        for name, value in zip(names, (budget, full_layers, alpha, ratio, variant), strict=True):
            object.__setattr__(self, name, value)
        super().__post_init__()
        check_number("alpha", alpha, lambda x: x > 0, "a positive number (inf: no threshold)")
        check_number("ratio", ratio, lambda x: 0 < x <= 1, "a part of the head dimension in (0, 1]")
        check_one_of("variant", variant, VARIANTS)

    def chosen_cost(self, use, budget: float) -> tuple[float, float]:
        columns = max(1, round(self.ratio * use.kind["key"]))
        return min(budget, use.held), use.held * use.kind["heads"] * columns * 2

    def start(self, layer) -> State:
        if self.whole(layer.index):
            return State(self, self)
        model = layer.model
        state = InfiniGenState(self, self)
        state.projection = query_projection(model, layer.index)
        if not is_folded(model):
            state.skew = skew(model)[layer.order]
        state.partial = Growing().start(layer)
        return state

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        if not self.whole(layer.index):
            layer.state.sums = None
            self._choose_columns(layer, query, keys)

    def extend(self, layer, query: Tensor, keys: Tensor) -> None:
        if self.whole(layer.index):
            return
        if layer.in_prompt and not layer.later:
            self._choose_columns(layer, query, keys)
        else:
            layer.state.append(keys[:, :, -query.shape[2] :])

    def append(self, layer, keys: Tensor) -> None:
        if not self.whole(layer.index) and keys.shape[2] == 1 and not layer.in_prompt:  # else: see `extend`
            layer.state.append(keys)

    def end_prefill(self, layer) -> None:
        if not self.whole(layer.index):
            layer.state.sums = None

    def _choose_columns(self, layer, query: Tensor, keys: Tensor) -> None:
        """By all queries and keys of the prompt so far. query: of this pass; keys: all held."""
        state, tokens = layer.state, query.shape[2]
        real = 1 if layer.some_empty is None else (layer.some_empty[..., -tokens:] >= 0).unsqueeze(-1)
        asked = state.skewed(query).abs().unflatten(1, (keys.shape[1], -1)).mean(2)
        new = asked, state.skewed(keys[:, :, -tokens:]).abs()  # padding does not count
        sums = tuple((size * real).sum(2) for size in new)
        if state.sums is not None:
            sums = tuple(size + earlier for size, earlier in zip(sums, state.sums, strict=True))
        rule, count = VARIANTS[self.variant], self.ratio * keys.shape[-1]
        count = max(1, int(count) if rule.official else round(count))
        state.columns = rule.columns(*sums, count)
        if state.projection is not None:
            state.asks = Narrow(state.projection, state.channels(query.shape[1], query.shape[3]))
        partial = state.partial_columns(keys)
        if state.partial.length and layer.some_empty is not None and not state.fewer:
            # what was exact of a row with no new token stays so (columns of a union come in another order)
            before, silent = state.partial_keys, ~real.any(2, keepdim=True)
            partial[:, :, : before.shape[2]] = before.where(silent, partial[:, :, : before.shape[2]])
        state.partial = Growing().start(layer)
        state.partial.add((partial,), ())
        state.sums = sums if layer.prefilling else None

    def speculate(self, layer, query) -> Tensor | None:
        """Rehearsal: choose the slots of the coming step, before the store holds the newest token."""
        state = layer.state
        said = {"norm": layer.index - 1} if VARIANTS[self.variant].official else {}
        asked = query(**said) if state.asks is None else query(**said, narrow=state.asks)
        guess, partial = state.partial_columns(asked), state.partial_keys
        scores = true_scores(guess, partial, layer.scaling, layer.some_empty, layer.softcap)
        counts = self.how_many(scores, self.caps(layer, appended=0), lambda x: all_heads(layer, x))
        state.guessed = most_important(group_importance(scores, partial.shape[1]), counts)
        return state.guessed

    def how_many(self, scores: Tensor, caps: list[int], over=lambda x: x) -> list[int]:
        """The alpha rule: tokens to fetch per row, from the guessed scores `[batch, heads, slots]`. over:
        gathers `[batch, heads, ...]` from all processes that share the layer's heads."""
        if self.alpha == math.inf:
            return caps
        rule, threshold = VARIANTS[self.variant], scores.amax(-1, keepdim=True) - self.alpha
        threshold = over(threshold)[:1, :1] if rule.one_threshold else threshold
        wanted = over(rule.within(scores, threshold).sum(-1))
        if rule.official:
            counts = [int(wanted.sum()) // wanted.numel()] * len(caps)
        else:
            counts = [math.ceil(sum(heads) / len(heads)) for heads in wanted.tolist()]
        return [max(1, min(pair)) for pair in zip(caps, counts, strict=True)]

    def select(self, layer, query: Tensor) -> Tensor | None:
        if self.whole(layer.index):
            return None
        guessed, layer.state.guessed = layer.state.guessed, None
        return guessed


class InfiniGenState(State):
    """See `InfiniGen`. Keys and queries are `[batch, heads or kv_heads, tokens, head_dim]`."""

    per_row = ("columns", "sums", "guessed")
    states = ("partial",)
    shared = ("skew", "projection", "asks")

    @property
    def fewer(self) -> bool:
        """Whether a head may have fewer columns than others."""
        return VARIANTS[self.policy.variant].columns is _union

    @property
    def partial_keys(self) -> Tensor:
        """The partial key cache, `[batch, kv_heads, slots, r]`."""
        return self.partial.parts()[0][0]

    def odd(self, batch: int, heads: int, slots: int, numbers: bool = True) -> str | None:
        if self.columns is not None and self.columns.shape[-1] != self.partial_keys.shape[-1]:
            return f"columns is of shape {tuple(self.columns.shape)}"
        return super().odd(batch, heads, slots, numbers)

    def channels(self, heads: int, head_dim: int) -> Tensor:
        """The channels `[n]` of a query `heads * head_dim` that some row needs for its columns."""
        columns = self.columns.repeat_interleave(heads // self.columns.shape[1], dim=1)
        first = head_dim * torch.arange(heads, device=columns.device)[:, None]
        return (columns + first)[columns >= 0].unique()

    def append(self, keys: Tensor) -> None:
        """New keys join the partial key cache."""
        self.partial.add((self.partial_columns(keys),), ())

    def skewed(self, x: Tensor) -> Tensor:
        """x A, fp32."""
        if self.skew is None:
            return x.float()
        matrix = self.skew.to(x.device)
        grouped = x.float().unflatten(1, (len(matrix), -1)).flatten(2, 3)
        return (grouped @ matrix).reshape(x.shape)

    def partial_columns(self, x: Tensor) -> Tensor:
        """The chosen columns of x A, zero where there is none."""
        columns = self.columns.repeat_interleave(x.shape[1] // self.columns.shape[1], dim=1).unsqueeze(2)
        taken = self.skewed(x).gather(3, columns.clamp(min=0).expand(-1, -1, x.shape[2], -1))
        return taken.masked_fill(columns < 0, 0.0) if self.fewer else taken
