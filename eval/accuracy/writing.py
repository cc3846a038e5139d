"""Greedy generation through caches, in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.decode import Stepper

from .choosing import Choice
from .scoring import Scorer


@torch.inference_mode()
def generate(
    scorer: Scorer, choices: list[Choice], stop: Callable, cuts: list[int] | None = None
) -> dict[str, list]:
    """Greedy tokens after each prompt: at most its limit, until `stop(tokens)` says it is enough.

    cuts: tokens of each prompt that are its context. Returns {method: token ids of each prompt}.
    """
    prompts, limit = [choice.prompt for choice in choices], choices[0].limit

    def compute(members: list[int]) -> dict[str, list]:
        texts = [choices[index] for index in members]
        drafts = [[] for _ in members]  # what another method wrote, for `recompute` to check

        def write(name: str, stepper: Stepper, logits: Tensor, rows: list) -> list:
            asked = [texts[row] for row in rows]
            if stepper.cache.recompute:
                return _check(scorer, name, stepper, asked, list(drafts), limit, stop)
            found = _write(scorer, name, stepper, logits, asked, limit, stop)
            for row, tokens in zip(rows, found, strict=True):
                drafts[row] = tokens
            return found

        contexts = None if cuts is None else [cuts[index] for index in members]
        return scorer.prompt([one.prompt for one in texts], write, contexts)

    return scorer.answered(len(prompts), scorer.packed(prompts, cuts), compute)


def _write(scorer: Scorer, name: str, stepper: Stepper, logits: Tensor, choices: list, limit: int, stop):
    """Greedy tokens after each prompt; logits `[rows, V]` are those of the prompts' ends."""
    made: list[list[int]] = [[] for _ in choices]
    lengths = torch.tensor([len(choice.prompt) for choice in choices])
    active = torch.arange(len(choices))
    for count in range(1, limit + 1):
        tokens = logits.argmax(-1).cpu()
        for place, row in enumerate(active.tolist()):
            if made[row] and stop(made[row]):
                continue
            if choices[row].processors:
                tokens[place] = choices[row].next(made[row], logits[place])
            made[row].append(int(tokens[place]))
        wanted = torch.tensor([not stop(made[row]) for row in active.tolist()])
        if count == limit or not wanted.any():
            break
        kept = scorer.thin(stepper, wanted, lengths[active] + count - 1)
        if kept is not None:
            active, tokens = active[kept], tokens[kept]
        logits = scorer.step(name, stepper, tokens)
    return made


def _check(scorer: Scorer, name: str, stepper: Stepper, choices: list, drafts: list, limit: int, stop):
    """What `recompute` writes, with fewer passes than one per token.

    A pass over a prompt and a draft gives the token that recomputing would choose at every place, as
    long as the draft agrees; at the first place where it does not, the pass's own token is taken and
    the next pass goes on from there, without a draft.
    """
    made: list[list[int]] = [[] for _ in choices]
    active = list(range(len(choices)))
    while active:
        texts = [[*choices[row].prompt, *made[row], *drafts[row]] for row in active]
        for part, logits in scorer.passes(stepper, texts):
            scorer.meters[name].add(stepper.cache, len(part))
            for row, found in zip([active[place] for place in part.tolist()], logits, strict=True):
                draft, drafts[row] = drafts[row], []
                after = found[len(found) - len(draft) - 1 :]  # [places, V]
                for place, token in enumerate(after.argmax(-1).tolist()):
                    if choices[row].processors:
                        token = choices[row].next(made[row], after[place])
                    made[row].append(token)
                    agrees = place < len(draft) and draft[place] == token
                    if len(made[row]) == limit or stop(made[row]) or not agrees:
                        break
        active = [row for row in active if len(made[row]) < limit and not stop(made[row])]
    return made
