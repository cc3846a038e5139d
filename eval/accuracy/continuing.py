"""Log-likelihoods of continuations, through caches, in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.decode import Stepper

from .batching import TAIL, pad_right, picked
from .scoring import Scorer


@torch.inference_mode()
def continuations(
    scorer: Scorer, groups: list[tuple[Sequence[int], list[list[int]]]], cuts: list[int] | None = None
) -> dict[str, list[list]]:
    """Log-likelihoods of each prompt's continuations.

    groups: (prompt ids, continuations). cuts: tokens of each prompt that are its context. An answer is,
    per group, a list of (sum of log-probabilities, whether greedy decoding would give it), in the order
    given.
    """

    def compute(members: list[int]) -> dict[str, list]:
        batch = [groups[index] for index in members]

        def score(name: str, stepper: Stepper, logits: Tensor, rows: list) -> list:
            return _continue(scorer, name, stepper, logits, [batch[row] for row in rows])

        contexts = None if cuts is None else [cuts[index] for index in members]
        longest = max(len(target) for _, targets in batch for target in targets)
        return scorer.prompt([prompt for prompt, _ in batch], score, contexts, longest)

    packed = scorer.packed(
        [prompt for prompt, _ in groups],
        cuts,
        rows=lambda index: max(1, len({tuple(targets[:-1]) for targets in groups[index][1]} - {()})),
        steps=lambda index: max(map(len, groups[index][1])),
    )
    size = lambda members: sum(len(groups[index][1]) for index in members)
    return scorer.answered(len(groups), packed, compute, size)


def _continue(scorer: Scorer, name: str, stepper: Stepper, logits: Tensor, batch: list) -> list[list]:
    """Each group's answers. Continuations that feed the same tokens (all but their last) share a row."""
    place: dict[tuple, int] = {}  # (context, tokens fed) -> row
    asked = [(owner, targets) for owner, (_, group) in enumerate(batch) for targets in group]
    row_of = [place.setdefault((owner, tuple(t[:-1])), len(place)) for owner, t in asked]
    owner = torch.tensor([owner for owner, _ in place])
    fed = pad_right([tokens for _, tokens in place], -1, "cpu")  # [rows, steps], -1 beyond a row's end
    steps = torch.tensor([len(tokens) for _, tokens in place])
    starts = torch.tensor([len(context) for context, _ in batch])[owner]
    row_of, last = torch.tensor(row_of), torch.tensor([targets[-1] for _, targets in asked])
    total, greedy = torch.zeros(len(place)).double(), torch.ones(len(place), dtype=torch.bool)
    ends, hits = torch.zeros(len(asked)).double(), torch.ones(len(asked), dtype=torch.bool)

    def score(step: int, rows: Tensor, logits: Tensor) -> None:
        """Logits `[rows, V]` after `step` fed tokens: the next fed token, or the last one."""
        if step < fed.shape[1]:
            chosen, hit = picked(logits, fed[rows, step])
            total[rows] += chosen
            greedy[rows] &= hit
        done = (steps[row_of] == step) & torch.isin(row_of, rows)
        if done.any():
            where = torch.empty(len(place), dtype=torch.long)
            where[rows] = torch.arange(len(rows))
            ends[done], hits[done] = picked(logits[where[row_of[done]]], last[done])

    active = torch.arange(len(place))
    if stepper.cache.recompute:
        _pass_over(scorer, stepper, batch, list(place), score)
        active = active[:0]
    elif logits is None:
        _at_once(scorer, name, stepper, batch, owner, fed, score)
        active = active[:0]
    else:
        score(0, active, logits.cpu()[owner])
        active = active[steps > 0]
    if len(active):
        stepper.fork(owner[active].to(scorer.device))
    for step in range(1, fed.shape[1] + 1 if len(active) else 0):
        kept = scorer.thin(stepper, steps[active] >= step, starts[active] + step - 1)
        active = active if kept is None else active[kept]
        tokens = fed[active, step - 1].clamp(min=0)
        score(step, active, scorer.step(name, stepper, tokens).cpu())
    found = zip((total[row_of] + ends).tolist(), (greedy[row_of] & hits).tolist(), strict=True)
    return [[next(found) for _ in targets] for _, targets in batch]


def _at_once(
    scorer: Scorer, name: str, stepper: Stepper, batch: list, owner: Tensor, fed: Tensor, score
) -> None:
    """Every row's prompt ends and its tokens follow, in one pass; owner `[rows]`, fed `[rows, steps]`."""
    ends = torch.tensor([context[-1] for context, _ in batch])[owner]
    again = torch.cat([torch.zeros(1, dtype=torch.bool), owner[1:] == owner[:-1]])  # the same end
    tokens, steps = torch.cat([ends[:, None], fed.long().clamp(min=0)], 1), (fed >= 0).sum(1)
    stepper.fork(owner.to(scorer.device))
    for first, active, found in scorer.known(name, stepper, tokens, steps + TAIL, again.long()):
        for step in range(first, first + found.shape[1]):
            rows = (steps[active] >= step).nonzero()[:, 0]
            score(step, active[rows], found[rows.to(found.device), step - first].cpu())


def _pass_over(scorer: Scorer, stepper: Stepper, batch: list, rows: list, score: Callable) -> None:
    """`recompute` stores nothing: one pass over context and fed tokens gives every step's logits."""
    for part, logits in scorer.passes(stepper, [[*batch[owner][0], *fed] for owner, fed in rows]):
        steps = torch.tensor([len(rows[row][1]) for row in part.tolist()])
        for step in range(int(steps.max()) + 1):
            here = (steps >= step).nonzero()[:, 0]
            score(step, part[here], logits[here, logits.shape[1] - 1 - (steps[here] - step)].cpu())
