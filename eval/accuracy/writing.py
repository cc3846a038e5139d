"""Greedy generation through caches, in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.decode import Stepper

from .batching import LOGITS, pad_left
from .scoring import Scorer


@torch.inference_mode()
def generate(
    scorer: Scorer, prompts: list[list[int]], limit: int, stop: Callable, cuts: list[int] | None = None
) -> dict[str, list]:
    """Greedy tokens for each prompt: at most `limit`, until `stop(tokens)` says it is enough.

    cuts: tokens of each prompt that are its context. Returns {method: token ids of each prompt}.
    """
    made: dict[str, list] = {name: [[] for _ in prompts] for name in scorer.caches}
    for part in scorer.packed(prompts, cuts):
        texts = [prompts[index] for index in part]
        drafts: list[list[int]] = []  # what another method wrote, for `recompute` to check

        def write(name: str, stepper: Stepper, logits: Tensor, texts=texts, drafts=drafts) -> list:
            if stepper.cache.recompute:
                known = list(drafts) or [[] for _ in texts]
                return _check(scorer, name, stepper, texts, known, limit, stop)
            drafts[:] = _write(scorer, name, stepper, logits, texts, limit, stop)
            return list(drafts)

        contexts = None if cuts is None else [cuts[index] for index in part]
        for name, written in scorer.prompt(texts, write, contexts).items():
            for index, tokens in zip(part, written, strict=True):
                made[name][index] = tokens
        scorer.advance(len(part))
    return {name: made[name] for name in scorer.caches}


def _write(scorer: Scorer, name: str, stepper: Stepper, logits: Tensor, prompts: list, limit: int, stop):
    """Greedy tokens after each prompt; logits `[rows, V]` are those of the prompts' ends."""
    made: list[list[int]] = [[] for _ in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    active = torch.arange(len(prompts))
    for count in range(1, limit + 1):
        tokens = logits.argmax(-1).cpu()
        for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
            if not made[row] or not stop(made[row]):
                made[row].append(token)
        wanted = torch.tensor([not stop(made[row]) for row in active.tolist()])
        if count == limit or not wanted.any():
            break
        kept = scorer.thin(stepper, wanted, lengths[active] + count - 1)
        if kept is not None:
            active, tokens = active[kept], tokens[kept]
        logits = scorer.step(name, stepper, tokens)
    return made


def _check(scorer: Scorer, name: str, stepper: Stepper, prompts: list, drafts: list, limit: int, stop):
    """What `recompute` writes, with fewer passes than one per token.

    A pass over a prompt and a draft gives the token that recomputing would choose at every place, as
    long as the draft agrees; at the first place where it does not, the pass's own token is taken and
    the next pass goes on from there, without a draft.
    """
    made: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    while active:
        texts = [[*prompts[row], *made[row], *drafts[row]] for row in active]
        size = max(1, LOGITS // scorer.vocabulary // max(map(len, texts)))
        for start in range(0, len(active), size):
            rows = active[start : start + size]
            ids, mask = pad_left(texts[start : start + size], 0, scorer.device)
            logits = Stepper(scorer.model, stepper.cache).feed(ids, attention_mask=mask)
            scorer.meters[name].add(stepper.cache, len(rows))
            for row, choices in zip(rows, logits.argmax(-1).tolist(), strict=True):
                draft, drafts[row] = drafts[row], []
                for place, token in enumerate(choices[len(choices) - len(draft) - 1 :]):
                    made[row].append(token)
                    agrees = place < len(draft) and draft[place] == token
                    if len(made[row]) == limit or stop(made[row]) or not agrees:
                        break
        active = [row for row in active if len(made[row]) < limit and not stop(made[row])]
    return made
