"""DuoAttention: some heads hold everything, the others first and recent tokens (Xiao et al. 2024, arXiv
2410.10819)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibrate.profile import read
from ..gather import in_order
from ..models.shape import is_latent
from ..named import named
from ..parameters import check_number, check_whole
from .base import Keep
from .state import KeepState

KIND = "duo"
LATENT = "latents are cached: all heads share them, and none can hold fewer"


@named(
    "duo",
    "Every token in heads that look far back, first and recent ones in others; "
    "python -m course.recipes.duo trains which.",
    "Xiao et al. 2024", same="heads=1", less="heads=0.4", look="purple s -.",
    technique="eviction by what was trained",
)  # fmt: skip
class Duo(Keep):
    """Heads that look far back hold every token, the others the first ones and a window of recent ones.
    Training decides which: `python -m course.recipes.duo` makes a profile of a model.

    Definition: a profile has a gate in [0, 1] for every KV head of every layer that attends. The share
    `heads` of all these heads with the largest gates holds everything; ties go to lower layers and then to
    lower head numbers. After the prompt and after every pass, every other head holds its first `sinks` tokens
    and the `recent` newest, with the numbers that the profile was trained with. Heads really hold different
    numbers of tokens: the store is a `Ragged` one.

    profile: file of a profile of this model. heads: share of the KV heads that hold everything; 1 keeps all.
    every: streaming heads drop tokens each time that they hold this many too many (None: at every pass).
    turns: see `Keep`.
    Deviations: our gates are trained on recall questions about facts in prose, the paper's on passkeys, and
    our loss takes the L1 of the gates' mean. The paper's streaming heads hold 64 first and 256 recent tokens,
    which is more than most prompts here have: a profile may have other numbers. While a prompt is read, all
    heads attend to all of it; in the paper, streaming heads do not.
    ValueError for a profile of another model, and for models that cache latents.
    State: `retrieves` `[kv_heads, 1]`, which heads of the layer hold everything.
    """

    ragged = True
    shared = ("retrieves",)

    def __init__(
        self, profile: str | None = None, heads: float = 0.5, every: int | None = None, turns: str = "all"
    ):
        super().__init__(1, every=every, turns=turns)
        check_number("heads", heads, lambda x: 0 <= x <= 1, "a share between 0 and 1")
        self.profile, self.heads = read(profile, KIND, gates=2), heads
        self.sinks, self.recent = (self.profile.about.get(name) for name in ("sinks", "recent"))
        for name, least in (("sinks", 0), ("recent", 1)):
            check_whole(f"profile={profile}: {name}", getattr(self, name), least)

    @property
    def evicts(self) -> bool:
        return self.heads != 1

    @property
    def retrieves(self) -> Tensor:
        """Which heads hold everything, bool `[layers that attend, kv_heads]`."""
        gates = torch.from_numpy(self.profile.arrays["gates"])
        order = gates.flatten().argsort(descending=True, stable=True)
        found = torch.zeros(gates.numel(), dtype=torch.bool, device="cpu")
        found[order[: round(self.heads * gates.numel())]] = True
        return found.view_as(gates)

    def limits(self, layer) -> list[float]:
        """Tokens that a head of the layer holds after its prompt, mean over the heads, as the bill asks."""
        self.profile.fits(gates=(layer.shape.layers, layer.shape.kv_heads))
        whole, found = float(self.retrieves[layer.order].float().mean()), []
        for tokens in layer.lengths:
            seen = min(tokens, layer.local - 1) if layer.local else tokens
            first = max(0, min(self.sinks, tokens - self.recent) - (tokens - seen))  # those still in sight
            found.append(whole * seen + (1 - whole) * (first + min(self.recent, seen)))
        return found

    def start(self, layer) -> KeepState:
        if is_latent(layer.model):
            raise ValueError(LATENT)
        if layer.order == 0:
            self.profile.check(layer.model, gates=(layer.shape.layers, layer.shape.kv_heads))
        state, mine = super().start(layer), self.retrieves[layer.order]
        first = layer.rank * layer.kv_heads
        state.retrieves = mine[first : first + layer.kv_heads, None]
        return state

    def by_rule(self, layer) -> Tensor:
        """All slots that stay."""
        positions = layer.slot_positions
        newest = positions.amax((1, 2), keepdim=True)
        near = (positions < self.sinks) | (positions > newest - self.recent)
        return (near | layer.state.retrieves.to(positions.device)) & (positions >= 0)

    def choose(self, layer) -> Tensor | None:
        state, positions = layer.state, layer.slot_positions
        held, stays = positions >= 0, self.held_by_rule(layer)
        over = (held & ~stays).sum(-1).amax(-1)  # of each row, in the head that has most
        due = over >= (1 if layer.in_prompt else self.every or 1)
        state.limits = layer.rows_held
        if not bool(due.any()):
            return None
        stays |= held & ~due[:, None, None]
        return in_order(stays)
