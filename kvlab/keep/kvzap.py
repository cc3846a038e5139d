"""KVzap: predict a token's KVzip score from its key and value (Jégou and Jeblick 2026, arXiv 2601.07891)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..calibrate.profile import read
from ..gather import among, gather_slots, in_order
from ..models import rotation_of
from ..named import named
from ..parameters import check_number, check_whole
from ..ranks import all_heads, own_heads
from .base import Keep, by_row, recent
from .state import KeepState

KIND = "kvzap"


@named(
    "kvzap",
    "What kvzip would keep, as guessed from a token's key and value; "
    "python -m course.recipes.kvzap calibrates the guess.",
    "Jégou and Jeblick 2026", same="threshold=1e-300", less="", look="purple H :",
    technique="eviction by what was trained",
)  # fmt: skip
class KVzap(Keep):
    """KVzip's scores without its second reading: in every layer a linear model predicts them from a token's
    keys and values when these are written. Tokens with low scores are dropped, while decoding too.

    Definition: x is the concatenation of a token's keys before RoPE and its values in all KV heads of the
    layer. The predicted log score in KV head h is w_h x + b_h. Once `recent` newer tokens have come, a token
    is dropped from the heads in which the prediction is below log(threshold); it is judged once. There is no
    budget: heads, layers and texts hold as many tokens as pass, in a `Ragged` store. The numbers w and b are
    calibrated: `python -m course.recipes.kvzap` makes a profile of a model by ridge regression to its KVzip
    scores.

    profile: file of a profile of this model. threshold: a weight between 0 and 1, below which a score is too
    low; 0 keeps all. recent: newest tokens that are not judged. None for either: the profile's value, chosen
    so that a stated share of its texts stays. every: judge each time that this many are due (None: at every
    pass). turns: see `Keep`.
    Deviations: the paper's linear model reads the layer's input, which a cache does not see; ours reads the
    layer's keys and values. The paper also has a two-layer network, which predicts better; ours is only
    linear. Our scores are KVzip's weights; the paper multiplies these by the norm of the value's contribution
    to the output and divides by the norm of the input. recent is 128 there, more than many prompts here.
    While a prompt is read, all of it is attended to, as in kvpress, the authors' code.
    ValueError for a profile of another model, and for models without RoPE.
    State: `judged`, for each row the number of tokens judged so far; `rotation`, how the layer rotates;
    `weight` `[kv_heads, numbers]` and `bias` `[kv_heads]` of its linear model, for the heads of all
    processes.
    """

    ragged = True
    per_row, shared = ("judged",), ("rotation", "weight", "bias")

    def __init__(
        self,
        profile: str | None = None,
        threshold: float | None = None,
        recent: int | None = None,
        every: int | None = None,
        turns: str = "all",
    ):
        super().__init__(1, every=every, turns=turns)
        self.profile = read(profile, KIND, weight=3, bias=2)
        own = self.profile.about.get("threshold"), self.profile.about.get("recent")
        given = own[0] if threshold is None else threshold, own[1] if recent is None else recent
        for where, (weight, tokens) in ((f"profile={profile}: ", own), ("", given)):
            check_number(f"{where}threshold", weight, lambda x: 0 <= x <= 1, "a weight between 0 and 1")
            check_whole(f"{where}recent", tokens, 1)
        self.threshold, self.recent = given
        self.share = self.profile.about.get("share") if given == own else None
        if self.share is not None:
            check_number(f"profile={profile}: share", self.share, lambda x: 0 < x <= 1, "a share of 1")

    @property
    def evicts(self) -> bool:
        return self.threshold != 0

    def shapes(self, shape) -> dict[str, tuple[int, ...]]:
        """The shapes of the linear models of a model of this shape."""
        heads = shape.layers, shape.kv_heads
        return {"weight": (*heads, shape.kv_heads * (shape.head_dim + shape.value_dim)), "bias": heads}

    def limits(self, layer) -> list[float]:
        """Tokens that a head of the layer holds after its prompt, as the bill asks: the share of the
        calibration's texts that the profile's own threshold held, over all heads. ValueError for another
        threshold, since the number held is unknown before the text is read."""
        self.profile.fits(**self.shapes(layer.shape))
        if self.share is None:
            raise ValueError("the text decides how many tokens stay, except at the profile's own threshold")
        return [max(self.share * tokens, min(self.recent, tokens)) for tokens in layer.lengths]

    def start(self, layer) -> KeepState:
        state = super().start(layer)
        state.rotation = rotation_of(layer)
        if layer.order == 0:
            self.profile.check(layer.model, **self.shapes(layer.shape))
        for name, of_layers in self.profile.arrays.items():
            setattr(state, name, torch.from_numpy(of_layers[layer.order]))
        return state

    def by_rule(self, layer) -> Tensor:
        return recent(layer, self.recent)

    def choose(self, layer) -> Tensor | None:
        state, positions = layer.state, layer.slot_positions
        state.limits = layer.rows_held
        before = state.judged or [0] * len(layer.lengths)
        least = 1 if layer.in_prompt else self.every or 1
        now = [max(length - self.recent, 0) for length in layer.lengths]
        now = [end if end - at >= least else at for at, end in zip(before, now, strict=True)]
        if now == before:
            return None
        state.judged = now
        due = (positions >= by_row(before, positions)) & (positions < by_row(now, positions))
        asked = in_order(due)  # [batch, kv_heads, n]: no head has let go of any of these
        low = self.guesses(layer, asked) < math.log(self.threshold)
        gone = among(asked.masked_fill(~low, -1), due.shape[2])
        return in_order((positions >= 0) & ~gone)

    def guesses(self, layer, slots: Tensor) -> Tensor:
        """Guessed logs of the scores of these slots `[batch, kv_heads, n]`, whose tokens are the same in all
        heads, same shape, fp64."""
        state, positions = layer.state, gather_slots(layer.slot_positions, slots)
        keys, values = (gather_slots(x, slots) for x in layer.store.read(slots.device))
        if state.rotation is not None:
            keys = state.rotation.undo(keys, positions)
        weight, bias = (x.to(slots.device, torch.float64) for x in (state.weight, state.bias))
        guessed = features(all_heads(layer, keys), all_heads(layer, values)).double() @ weight.T + bias
        return own_heads(layer, guessed.transpose(1, 2))


def features(keys: Tensor, values: Tensor) -> Tensor:
    """What a layer holds of a token: keys before RoPE and values `[batch, kv_heads, n, head_dim]`, side by
    side, head after head, `[batch, n, kv_heads * 2 * head_dim]`."""
    return torch.cat([keys, values], -1).transpose(1, 2).flatten(2)
