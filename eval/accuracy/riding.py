"""Riding along: under `full` an answer passes together with its prompt, in one pass through the cache.

A cache that holds everything as it was made gives the next token what plain attention gives it, so it does
not matter whether an answer comes with the prompt or after it. One pass reads the weights once, and of the
prompt's positions no logits are computed. Where answers share a long prompt, reading that once costs less.
No other method rides: what it compresses must be compressed before the answer comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab import KVCache
from kvlab.decode import Stepper
from kvlab.layer import Layer
from kvlab.place import Device
from kvlab.store import Exact, Growing

from .batching import LOGITS, TAIL, Meter, pack, pad_left, picked

Group = tuple[Sequence[int], list[list[int]]]  # a prompt and its continuations


def carries(cache) -> bool:
    """Whether a cache holds every token as it was made, on the device, and attends to all of them."""
    return isinstance(cache, KVCache) and cache.continues and all(map(_whole, cache.layers))


def _whole(layer) -> bool:
    if type(layer) is not Layer or layer.local is not None or layer.keep.policy.evicts:
        return False
    store = layer.store.policy
    plain = type(store) is Growing and type(store.format) is type(store.values) is Exact and not store.sinks
    return plain and type(layer.place.policy) is Device


def pays(group: Group) -> bool:
    """Whether reading the prompt again for each answer costs less than a pass for the answers by themselves,
    which are padded, as answers of prompts of one length: so where fewer tokens are read again than fed."""
    prompt, targets = group
    fed = {tuple(one[:-1]) for one in targets}
    return (len(fed) - 1) * len(prompt) <= sum(map(len, fed))


def per_column(stats, held: int) -> dict[str, float]:
    """Bytes of each of the `held` tokens of a cache, padding included: of every token the same."""
    return {name: getattr(stats, name) / held for name in Meter.NAMES}


def ride(scorer, name: str, groups: list[Group]) -> list[list[tuple[float, bool]]]:
    """The answers of `Scorer.continuations` under the cache `name`, in the order given.

    Answers that feed the same tokens (all but their last) share a row.
    """
    place: dict[tuple, list] = {}  # (group, tokens fed) -> the answers that end there
    for owner, (_, targets) in enumerate(groups):
        for number, target in enumerate(targets):
            place.setdefault((owner, tuple(target[:-1])), []).append((number, target[-1]))
    rows = list(place)
    answers: list = [[None] * len(targets) for _, targets in groups]
    most = LOGITS // scorer.vocabulary // max(len(fed) + TAIL for _, fed in rows)
    length = lambda row: len(groups[row[0]][0]) + len(row[1])
    # prompts whose last token is metered already, or is no step since nothing comes before it
    begun = {owner for owner, (prompt, _) in enumerate(groups) if len(prompt) == TAIL}
    column: dict[str, float] = {}
    for part in pack(rows, length, max(1, min(scorer.batch_size, most))):
        texts = [[*groups[owner][0], *fed] for owner, fed in part]
        ids, mask = pad_left(texts, 0, scorer.device)
        steps = torch.tensor([len(fed) + TAIL for _, fed in part])
        again = []
        for owner, _ in part:
            again.append(int(owner in begun))
            begun.add(owner)
        cache = scorer.caches[name]
        cache.reset()
        logits = Stepper(scorer.model, cache).feed(ids, attention_mask=mask, last=int(steps.max()))
        scorer.prefilled += sum(map(len, texts)) - int(steps.sum())
        column = column or per_column(cache.stats(), ids.numel())
        scorer.meters[name].add_ridden(column, ids.shape[1], steps, torch.tensor(again))
        for (owner, fed), own in zip(part, logits, strict=True):
            own = own[-len(fed) - TAIL :]
            chosen, hits = picked(own[:-1], torch.tensor(fed, dtype=torch.long, device=own.device))
            total, greedy = float(chosen.sum()), bool(hits.all())
            members = place[owner, fed]
            ends = torch.tensor([last for _, last in members], device=own.device)
            ended, hits = picked(own[-1].expand(len(members), -1), ends)
            for (number, _), more, hit in zip(members, ended.tolist(), hits.tolist(), strict=True):
                answers[owner][number] = (total + more, greedy and hit)
        cache.reset()
        scorer.advance(sum(len(place[row]) for row in part))
    return answers
