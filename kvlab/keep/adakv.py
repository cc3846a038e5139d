"""AdaKV: the heads of a layer share one budget (Feng et al. 2024, arXiv 2407.11550)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..parameters import check_number, shown
from ..policy import State
from ..ranks import all_heads, own_heads
from . import checked
from .base import Keep, counts


class AdaKV(Keep):
    """After the prompt, the tokens of all heads of a layer compete for one budget, by the score of another
    keep: a head that spreads its attention holds more tokens, one that concentrates it holds fewer.

    Definition: with H KV heads and a budget of B tokens a head, each head's best safeguard * B tokens and its
    newest token stay; then the best of all others, in any head, until the layer holds H * B tokens. The
    number that each head then holds is its share; if the other keep evicts later, each head stays within its
    share. Heads really hold different numbers of tokens: the store is a `Ragged` one.

    of: the keep that scores, any that overrides `score` and not `choose`. It sets the budget, `chunk_length`,
    `every` (counted in the head that holds most), `renumber` and `turns`.
    safeguard: part of an even share that each head always holds (0.2 as in the paper's experiments).
    Deviation: the paper first counts H * B tokens over all heads and then mixes these counts with an even
    share; here the protected tokens are taken first, as in kvpress, so that the budget is met exactly.
    """

    ragged = True

    def __init__(self, of: Keep, safeguard: float = 0.2):
        scores = isinstance(of, Keep) and not of.ragged and type(of).choose is Keep.choose
        if not scores or of.merge:
            raise ValueError(f"of={shown(of)}: expected a keep that scores tokens, such as SnapKV(0.2)")
        check_number("safeguard", safeguard, lambda x: 0 <= x <= 1, "a part of the share between 0 and 1")
        others = ("chunk_length", "every", "renumber", "turns")
        super().__init__(of.budget, **{name: getattr(of, name) for name in others})
        self.of, self.safeguard = of, safeguard

    observes = property(lambda self: self.of.observes)
    last_queries = property(lambda self: self.of.last_queries)
    reads_queries = property(lambda self: self.of.reads_queries)
    once = property(lambda self: self.of.once)
    scores_keys = property(lambda self: self.of.scores_keys)

    def start(self, layer) -> State:
        state = self.of.start(layer)
        state.policy = self
        return state

    def observe(self, layer, received: Tensor | None) -> None:
        self.of.observe_and_check(layer, received)

    def note(self, layer, query: Tensor) -> None:
        self.of.note(layer, query)

    def score(self, layer) -> Tensor:
        return checked.score(self.of, layer, self.of.score(layer))

    def by_rule(self, layer) -> Tensor:
        return self.of.held_by_rule(layer)

    def forget(self, state) -> None:
        self.of.forget(state)

    def limits(self, layer) -> list[int]:
        return self.of.limits(layer)

    def shares(self, layer, score: Tensor) -> Tensor:
        limits, score = torch.tensor(layer.state.limits, device=score.device), all_heads(layer, score)
        safe = (self.safeguard * limits + 1e-6).long().view(-1, 1, 1)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        score = score.masked_fill((rank < safe) & (score > -torch.inf), torch.inf)
        shares = own_heads(layer, counts([score], limits * score.shape[1])[0])
        short = torch.tensor(layer.rows_held, device=score.device) <= limits  # nothing goes: heads stay even
        return torch.where(short[:, None], limits[:, None], shares)
