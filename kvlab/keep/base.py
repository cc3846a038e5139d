"""Keep: which tokens stay. The base class ranks them; a method defines the score."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..models.shape import is_latent
from ..parameters import check_bool, check_fraction_or_count, check_one_of, check_whole, resolve_budget
from ..policy import Policy, State
from . import checked
from .state import KeepState

FINITE = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max  # infinity is the newest token's


@dataclass(frozen=True)
class Keep(Policy):
    """Keep the `budget` tokens with the highest `score`, separately for each row and head.

    A new method overrides `score`. The newest token always stays. A method that wants to `observe` attention
    sets `observes = True` and lists the names of its tensors in `per_slot` (or `per_row`): they are
    attributes of `layer.state`, and evictions and forks apply to them too. If a window moves on before the
    next `observe`, tokens that were never observed have zeros there. With parameters besides `budget` a
    method is a dataclass (`keep/sinks.py`), otherwise a plain class (`keep/tova.py`).

    budget: tokens held; a fraction is of the row's own prompt length, or of the layer's window if that is
    shorter, and is fixed when the prompt has ended; 1 keeps all. Tokens outside the window are dropped
    anyway.
    chunk_length (`chunk=` of a method): tokens that stay or go together: a token that no rule holds gets the
    mean score of its chunk of the text, in each KV head; the first tokens of the last chunk that the budget
    reaches stay (ChunkKV, Liu et al. 2025, arXiv 2502.00299, where a chunk scores its sum over all heads and
    the budget counts whole chunks).
    every: compress while decoding too, each time this many tokens have come on top of the budget. None: the
    method's default, after every pass or (`once`) after the prompt alone. A method that observes attention
    then sees only the step's.
    renumber: attend as if the tokens held were consecutive and ended with the newest (Xiao et al. 2023,
    section 3.2): keys are rotated to these positions when they are read, so models without RoPE are refused.
    merge: a token that is dropped is merged into the kept token with the most similar key
    (`kvlab/merging.py`).
    turns: "all": a later turn of several tokens is a prompt again, and a fraction is then of all tokens that
    the row has seen (`kvlab/turns.py`). "first": it continues the text.
    """

    budget: float | int = 0.2
    chunk_length: int = field(default=1, kw_only=True, repr=False)
    every: int | None = field(default=None, kw_only=True, repr=False)
    renumber: bool = field(default=False, kw_only=True, repr=False)
    merge: bool = field(default=False, kw_only=True, repr=False)
    turns: str = field(default="all", kw_only=True, repr=False)

    observes = False  # True: `observe` is called with the attention that every slot received ...
    last_queries = None  # ... in the prompt, from this many of its last queries (None: all)
    reads_queries = False  # True: `note` is called with the queries of every pass
    once = False  # True: the prompt is compressed, and all later tokens stay
    scores_keys = False  # True: `score` is made from keys, which a model that caches latents does not hold
    newest_stays = True  # False: `choose` may let the newest token go
    ragged = False  # True: `shares` lets heads hold different numbers of tokens, in a `Ragged` store
    rereads = False  # True: after the prompt the model reads the tokens of `again`; see `hear`
    sinks = 0  # first tokens that stay by rule
    per_row = ()  # names in the state: tensors [batch, ...], or lists with an entry for each row
    per_slot = ()  # names in the state: tensors [batch, kv_heads, slots, ...]
    shared = ()  # names in the state: attributes that belong to no row and no slot

    def __post_init__(self):
        object.__setattr__(self, "budget", check_fraction_or_count("budget", self.budget))
        check_whole("chunk", self.chunk_length, 1)
        check_one_of("turns", self.turns, ("all", "first"))
        if self.every is not None:
            check_whole("every", self.every, 1)
        for name in ("renumber", "merge"):
            check_bool(name, getattr(self, name))
        check_whole("sinks", self.sinks, 0)

    @property
    def evicts(self) -> bool:
        return self.budget != 1

    @property
    def prompt_only(self) -> bool:
        """Whether no token is dropped after the prompt has been compressed."""
        return self.once and self.every is None

    def start(self, layer) -> State:
        if self.scores_keys and is_latent(layer.model):
            raise ValueError("latents are cached: there are no keys to compare")
        checked.inherits(self)
        return KeepState(self)

    def observe(self, layer, received: Tensor | None) -> None:
        """`received` `[batch, kv_heads, slots]`: attention weight that each slot got in this pass, summed
        over the queries and averaged over the query heads of the group; None for a keep that does not
        observe."""

    def observe_and_check(self, layer, received: Tensor | None) -> None:
        """`observe`, and a check of the state that it leaves."""
        self.observe(layer, received)
        checked.state(self, layer)

    def note(self, layer, query: Tensor) -> None:
        """The queries of a pass `[batch, heads, tokens, head_dim]`, after RoPE, of the newest tokens."""

    def again(self, layer, model, ids: Tensor, real: Tensor):
        """The tokens that a keep with `rereads` wants the model to read after the prompt, without leaving
        anything in the cache: yields (ids `[batch, n]`, real bool `[batch, n]`, anything that `hear` needs)
        for each pass. ids, real `[batch, tokens]`: the prompt; layer: the first one."""
        raise TypeError(f"{type(self).__name__} must say what it reads again: define again")

    def hear(self, layer, given, asked: Tensor, positions: Tensor, part) -> None:
        """Called for every layer in such a pass. given: its `Recorded`, with keys and values of the tokens
        held and then of those read; positions `[batch, 1 or kv_heads, held + n]`: their positions, -1 for
        none; asked `[batch, n]`: the queries' positions; part: the third item that `again` yielded."""

    def agree(self, layers) -> None:
        """Called after all passes: a keep that decides over several layers (`View`s) sets their
        `state.shares`."""

    def score(self, layer) -> Tensor:
        """Importance of every slot, `[batch, kv_heads, slots]`; ties go to the older token.

        `layer` is a `View`. A score can be made from the attention received (what `observe` wrote to
        `layer.state`), from `layer.slot_positions` `[batch, kv_heads, slots]` (-1: empty) and `layer.lengths`
        (tokens seen per row), or from the keys:
        `keys, values = layer.store.read(layer.slot_positions.device)`, `[batch, kv_heads, slots, head_dim]`
        each, decoded; on a host this brings both to the device at every pass, which is not counted as moved.
        Scores that differ only by rounding must be made equal (`score.round(decimals=3)`), or a padded batch
        and a single row choose differently. The score of an empty slot does not matter. A score of another
        shape, or NaN for a token, raises ValueError.
        """
        raise TypeError(f"{type(self).__name__} must say how it scores tokens: define score(layer)")

    def by_rule(self, layer) -> Tensor:
        """The slots that stay whatever their score, bool `[batch, kv_heads, slots]`: the newest token, the
        first `sinks`, and other tokens that a method's definition names by their place in the text (a recent
        window). The score chooses the rest."""
        return newest(layer) | first(layer, self.sinks)

    def limits(self, layer) -> list[int]:
        """Tokens that each row may hold after its prompt."""
        return [resolve_budget(self.budget, tokens) for tokens in prompts(layer)]

    def shares(self, layer, score: Tensor) -> Tensor | None:
        """Tokens that each head may hold after the prompt, int `[batch, kv_heads]`, by this score (`ranked`);
        None: every head as many as `limits` says. A `ragged` keep overrides it."""

    def choose(self, layer) -> Tensor | None:
        """Slots that stay after the prompt (`layer.in_prompt`) and after every later pass, `[batch, kv_heads,
        n]` in order of position, -1 at the end where a head holds fewer; None if no token has to go. The
        newest token always stays. `state.limits` and `state.longest` belong to this implementation: an
        override need not set them."""
        state = layer.state
        if layer.in_prompt:
            state.limits = state.longest = checked.limits(self, layer, self.limits(layer))
            if state.shares is not None:
                state.longest = state.shares.amax(-1).tolist()
        elif self.prompt_only:
            return None
        elif self.every:
            pairs = zip(layer.rows_held, state.goal, strict=True)
            now = [goal if held - goal >= self.every else max(held, goal) for held, goal in pairs]
            state.longest = now
            if state.shares is None:
                state.limits = now
        slots = self._best(layer)
        if layer.in_prompt:
            state.goal = state.longest if self.every else None
        self.forget(state)
        return slots

    def held_by_rule(self, layer) -> Tensor:
        """What `by_rule` returns."""
        return checked.rule(self, layer, self.by_rule(layer))

    def chosen(self, layer) -> tuple[Tensor | None, list[int] | None]:
        """The result of `choose`, and the number of tokens that each row may then hold, in its largest
        head."""
        state = layer.state
        if type(self).choose is Keep.choose:
            return self.choose(layer), state.longest
        if layer.in_prompt:
            state.limits = None
        slots = checked.slots(self, layer, self.choose(layer))
        held = None if slots is None else (slots >= 0).sum(-1).amax(-1).tolist()
        if state.limits is None:
            state.limits = held
        return slots, held

    def forget(self, state) -> None:
        """Called after the choice: state that only one choice needs may go."""

    def ranked(self, layer) -> Tensor:
        """`score`, fp32, infinite for the newest token, and minus infinite where a slot is empty."""
        score = self.scored(layer).masked_fill(newest(layer), torch.inf)
        return score.masked_fill(layer.slot_positions < 0, -torch.inf)

    def scored(self, layer) -> Tensor:
        """`score`, finite fp32, of chunks where tokens go by chunks."""
        score = checked.score(self, layer, self.score(layer)).float().clamp(*FINITE)
        if self.chunk_length > 1:
            score = by_chunk(score, layer.slot_positions, self.held_by_rule(layer), self.chunk_length)
        return score

    def _best(self, layer) -> Tensor | None:
        """The best slots of every head, as `choose` returns them."""
        state, positions = layer.state, layer.slot_positions
        over = [held - limit for held, limit in zip(layer.rows_held, state.longest, strict=True)]
        even = state.shares is None
        if (even or (self.every and not layer.in_prompt)) and max(over) <= 0:
            return None
        score, slots = self.ranked(layer), positions.shape[2]
        shares = checked.shares(self, layer, self.shares(layer, score)) if layer.in_prompt and even else None
        if shares is not None:
            state.shares, state.longest, even = shares, shares.amax(-1).tolist(), False
        if even and all(gone == 1 for gone in over) and min(layer.rows_held) == slots:
            return _all_but_the_lowest(score)  # the usual decode step
        limits = by_row(state.longest, score)
        if not even:  # heads as far below the longest one as their shares are
            limits = limits + (state.shares - state.shares.amax(-1, keepdim=True))[..., None]
        order = score.argsort(dim=-1, descending=True, stable=True)[..., : max(state.longest)]
        rank = torch.arange(order.shape[-1], device=order.device)
        stays = (rank < limits) & (positions.gather(2, order) >= 0)
        chosen = order.masked_fill(~stays, slots).sort(dim=-1).values
        return chosen.masked_fill(chosen == slots, -1)


def newest(layer) -> Tensor:
    """Which slots hold the newest token of their head, bool `[batch, kv_heads, slots]`."""
    return layer.slot_positions == layer.slot_positions.amax(-1, keepdim=True)


def first(layer, count: int) -> Tensor:
    """Which slots hold one of a row's first tokens."""
    return (layer.slot_positions >= 0) & (layer.slot_positions < count)


def recent(layer, count: int | list[int]) -> Tensor:
    """Which slots hold one of the last `count` tokens that a row has seen (a list: for each row)."""
    counts = [count] * len(layer.lengths) if isinstance(count, int) else count
    start = [seen - mine for seen, mine in zip(layer.lengths, counts, strict=True)]
    return layer.slot_positions >= by_row(start, layer.slot_positions)


def by_row(numbers: list[int], like: Tensor) -> Tensor | int:
    """A number for each row, `[batch, 1, 1]`, to compare with `like`; if all rows agree, one number, which
    needs no copy to the device."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return torch.tensor(numbers, device=like.device).view(-1, 1, 1)


def prompts(layer) -> list[int]:
    """The lengths that a fraction refers to: each row's prompt, or the window if that is shorter."""
    return [min(tokens, layer.local or tokens) for tokens in layer.lengths]


def by_chunk(score: Tensor, positions: Tensor, by_rule: Tensor, chunk: int) -> Tensor:
    """Scores `[batch, kv_heads, slots]` as means over the tokens of a chunk of the text that no rule
    holds."""
    own = (positions >= 0) & ~by_rule
    index = (positions.clamp(min=0) // chunk).long()
    total = score.new_zeros(*score.shape[:2], int(index.amax()) + 1)
    count = total.scatter_add(2, index, own.to(score.dtype)).clamp(min=1)
    mean = (total.scatter_add(2, index, score.masked_fill(~own, 0.0)) / count).clamp(*FINITE)
    return torch.where(own, mean.gather(2, index), score)


def counts(scores: list[Tensor], limits: Tensor) -> list[Tensor]:
    """How many of a row's `limits` `[batch]` best slots are in each head of each layer, `[batch, kv_heads]`.
    scores: by layer `[batch, kv_heads, slots]`, -inf where a slot is empty; ties go to the first layer, in it
    to the first head, and in it to the older token."""
    flat = torch.cat([score.flatten(1) for score in scores], 1)
    best = flat.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < limits[:, None]
    best &= flat > -torch.inf
    parts = best.split([score[0].numel() for score in scores], 1)
    return [part.view_as(score).sum(-1) for part, score in zip(parts, scores, strict=True)]


def _all_but_the_lowest(score: Tensor) -> Tensor:
    """All slots except the one with the lowest score (the last of them in a tie)."""
    slots = score.shape[-1]
    lowest = slots - 1 - score.flip(-1).argmin(dim=-1, keepdim=True)
    index = torch.arange(slots - 1, device=score.device)
    return index + (index >= lowest)


class KeepAll(Keep):
    """Every token stays."""

    def __init__(self):
        super().__init__(budget=1)
