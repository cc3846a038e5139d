"""InfiniGen: guess one layer ahead which tokens attention will want (Lee et al. 2024, OSDI; document 001)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention import group_importance
from ..calibrate.fold import is_folded
from ..calibrate.skew import skew
from ..models import report_block_inputs
from ..store.static import Roomy
from .topk import TopK, most_important, true_scores


def _sum(queried: Tensor, keyed: Tensor, count: int) -> Tensor:
    return (queried + keyed).topk(count, dim=-1).indices


def _query(queried: Tensor, keyed: Tensor, count: int) -> Tensor:
    return queried.topk(count, dim=-1).indices


def _union(queried: Tensor, keyed: Tensor, count: int) -> Tensor:
    chosen = torch.zeros_like(queried)
    for size in (queried, keyed):
        chosen.scatter_(-1, size.topk(count, dim=-1).indices, 1.0)
    most = int(chosen.sum(-1).max())
    columns = chosen.topk(most, dim=-1).indices
    return columns.masked_fill(chosen.gather(-1, columns) == 0, -1)


# How the columns of the partial query and key are chosen from the sums over the prompt of |Q~| and |K~|,
# `[batch, kv_heads, head_dim]` each. The official code's rehearsal besides uses the norm of the layer before,
# and one count of tokens for the whole batch.
VARIANTS = {"paper": _sum, "official-speed": _query, "official-accuracy": _union}


class InfiniGen(TopK):
    """Rehearse layer i's attention at layer i-1 on a few columns of K, and fetch what looks important.

    The inputs of successive blocks are alike, so LN_i(input of block i-1) W_q gives a query close to the one
    layer i will ask. After skewing (`skew.py`) a few columns of Q and K carry most of the score; after the
    prefill those with the largest sum over the prompt of |Q~| + |K~| are chosen per row and head and copied
    into a partial key cache on the device. At every step the guessed scores pick n tokens,
    n = min(cap, mean over the heads of #{scores > max - alpha}), the same n for all heads of a row, each
    head its own top n. The first layers fetch everything; the newest token is always attended.

    budget: the cap, as in `TopK`. alpha: how far below the head's best guessed score (after scaling) a token
    may lie (the paper: 4 for OPT, 5 for Llama-2; inf: cap alone decides). ratio: part of the head dimension
    used for the guess (0.3 in the paper). full_layers: first layers that fetch everything (2 in the paper).
    variant: "paper", or one of `VARIANTS` after the official code. calibration: token ids `[1, tokens]` for
    the skewing, by default those of `models.calibration_ids`.
    In a model that `fold` has changed, queries and keys come out skewed; in others they are rotated at run
    time (the same numbers; the matrices belong to the model and are not counted as cache bytes). The mean
    count is rounded up.
    """

    def __init__(self, budget=0.2, alpha: float = 4.0, ratio: float = 0.3, full_layers: int = 2,
                 calibration: Tensor | None = None, variant: str = "paper"):  # fmt: skip
        super().__init__(budget, full_layers)
        if not isinstance(alpha, int | float) or not alpha > 0:
            raise ValueError(f"alpha={alpha!r}: expected a positive number (inf: no threshold)")
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: expected a part of the head dimension in (0, 1]")
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r}: expected one of {', '.join(VARIANTS)}")
        self.alpha, self.ratio, self.variant = alpha, ratio, variant
        self._calibration = None if calibration is None else calibration.tolist()  # no state of a row
        self.columns: Tensor | None = None  # [batch, kv_heads, r]: the chosen columns, -1: one fewer
        self.guessed = None  # [batch, kv_heads, n]: slots to fetch at the coming step
        self._keys = Roomy()  # the chosen columns of K A
        self._open = False  # more of the prompt may come; then the sums of |Q~| so far, [batch, kv_heads, d]
        self._sums: Tensor | None = None

    @property
    def partial(self) -> Tensor | None:
        """The partial key cache, `[batch, kv_heads, slots, r]`."""
        return self._keys.parts()[0][0] if self._keys.length else None

    @property
    def rehearses(self) -> bool:
        return not self.full

    def bind(self, shape, layer: int, model=None) -> None:
        super().bind(shape, layer, model)
        if not self.full:
            report_block_inputs(model)
            self._layer = layer
            self._skew = None if is_folded(model) else skew(model, self._calibration)

    def _skewed(self, x: Tensor) -> Tensor:
        """x A for `[batch, heads or kv_heads, tokens, head_dim]`, fp32."""
        if self._skew is None:
            return x.float()
        matrix = self._skew[self._layer].to(x.device)
        grouped = x.float().unflatten(1, (len(matrix), -1)).flatten(2, 3)
        return (grouped @ matrix).reshape(x.shape)

    def _take_columns(self, x: Tensor) -> Tensor:
        """The chosen columns of `[batch, heads or kv_heads, tokens, head_dim]`, zero where there is none."""
        columns = self.columns.repeat_interleave(x.shape[1] // self.columns.shape[1], dim=1).unsqueeze(2)
        taken = x.gather(3, columns.clamp(min=0).expand(-1, -1, x.shape[2], -1))
        return taken if self.variant != "official-accuracy" else taken.masked_fill(columns < 0, 0.0)

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        if self.full:
            return
        self._sums = None
        self._choose(layer, query, keys)

    def extend(self, layer, query: Tensor, keys: Tensor) -> None:
        if self._open:  # the prompt goes on
            self._choose(layer, query, keys)
        elif not self.full:
            self._keys.add((self._take_columns(self._skewed(keys[:, :, -query.shape[2] :])),), ())

    def append(self, layer, keys: Tensor) -> None:
        if not self.full and keys.shape[2] == 1:  # more than one: see `extend`
            self._keys.add((self._take_columns(self._skewed(keys)),), ())

    def _choose(self, layer, query: Tensor, keys: Tensor) -> None:
        """Choose columns by all queries and keys of the prompt so far: these queries, and all keys."""
        query, keys = self._skewed(query), self._skewed(keys)
        real = 1 if layer.some_empty is None else (layer.some_empty >= 0).unsqueeze(-1)  # padding has no say
        keyed = (keys.abs() * real).sum(2)
        asked = real if layer.some_empty is None else real[:, :, -query.shape[2] :]
        queried = (query.abs().unflatten(1, (keys.shape[1], -1)).mean(2) * asked).sum(2)
        queried = queried if self._sums is None else queried + self._sums
        count = max(1, round(self.ratio * keys.shape[-1]))
        self.columns = VARIANTS[self.variant](queried, keyed, count)
        self._keys = Roomy()
        self._keys.add((self._take_columns(keys),), ())
        self._open, self._sums = layer.more, queried if layer.more else None

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._keys.select_rows(rows)

    def keep_slots(self, slots: Tensor) -> None:
        if self._keys.length:
            self._keys.keep_slots(slots)

    def crop(self, length: int) -> None:
        self._keys.crop(length)

    def speculate(self, layer, query) -> None:
        """Rehearsal: choose the slots of the coming step, before the store holds the newest token."""
        if not self.full and self.partial is not None:
            asked = query() if self.variant == "paper" else query(norm=self._layer - 1)
            guess = self._take_columns(self._skewed(asked))
            scores = true_scores(guess, self.partial, layer.scaling, layer.some_empty)
            counts = self._how_many(scores, self.caps(layer, appended=0))
            self.guessed = most_important(group_importance(scores, self.partial.shape[1]), counts)

    def _how_many(self, scores: Tensor, caps: list[int]) -> list[int]:
        """The alpha rule: tokens to fetch per row, from the guessed scores `[batch, heads, slots]`."""
        if self.alpha == math.inf:
            return caps
        near = scores > scores.amax(-1, keepdim=True) - self.alpha
        wanted = near.sum(-1)  # [batch, heads]
        if self.variant != "paper":  # the official code: one count for all rows
            wanted = wanted.flatten().expand(len(caps), -1)
        means = [math.ceil(sum(heads) / len(heads)) for heads in wanted.tolist()]
        return [max(1, min(pair)) for pair in zip(caps, means, strict=True)]

    def select(self, layer, query: Tensor, scaling: float) -> Tensor | None:
        guessed, self.guessed = self.guessed, None
        return guessed
