"""Parts of batches of rows: padding, grouping, picking scores, counting bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvlab import KVCache
from kvlab.layer import Layer
from kvlab.place import Device
from kvlab.store import Growing, Static

TAIL = 1  # context tokens that already go through the cache
PREFILLED = 0.9  # part of a rolling window that is prefilled
TOKENS = 8192  # prompt tokens prefilled at once, padding included; few, to stay in the processor's cache
TOKENS_LONG = 32768  # the same where many tokens are decoded after the prefill: there rows count
RECORDED = 2**31  # bytes of queries, keys and values of a prompt's pass that are held for several caches
PASS = 32  # tokens whose work a pass costs beside that of its own: all weights are read
LOGITS = 2**27  # logits held at once where those of every position are needed (0.5 GB in fp32)


class Meter:
    """Bytes per row and decode step, averaged over every decode step made; and of the slots that a keep held,
    the share that its score chose (`kvlab.Stats.scored`), averaged alike."""

    NAMES = ("device_bytes", "host_bytes", "moved_bytes")

    def __init__(self):
        self.sums = Counter()  # bytes and shares, each times its steps, and the steps

    def add(self, cache, rows: int) -> None:
        stats = cache.stats()
        self._count(rows, stats.scored, {name: int(getattr(stats, name)) for name in self.NAMES})

    def add_pass(self, before, after, columns: int, steps: Tensor, skipped: Tensor | int = 0) -> None:
        """A pass over `columns` known tokens of every row, in place of decode steps.

        before, after: the cache's `Stats` (bytes grow evenly in between, see `steps_at_once`); steps
        `[rows]`: how many of the pass's tokens are a row's own; skipped `[rows]`: how many first ones of
        these another row covers.
        """
        steps, skipped = steps.double(), torch.as_tensor(skipped, dtype=torch.float64)
        sizes = {}
        for name in self.NAMES:
            first, last = getattr(before, name) / len(steps), getattr(after, name) / len(steps)
            grown = (last - first) / columns * (steps * (steps + 1) - skipped * (skipped + 1)) / 2
            sizes[name] = round(float((first * (steps - skipped) + grown).sum()))
        self._count(int((steps - skipped).sum()), after.scored, sizes)

    def _count(self, steps: int, scored: float | None, sizes: dict[str, int]) -> None:
        """So many steps of one row; sizes: the sums of their bytes."""
        self.sums.update(sizes, row_steps=steps)
        if scored is not None:
            self.sums.update(chosen=scored * steps, chosen_steps=steps)

    def join(self, other: Meter) -> None:
        self.sums.update(other.sums)

    def means(self) -> dict[str, float]:
        """Mean bytes per row; `row_steps` says over how many rows and steps (0: nothing decoded)."""
        steps = self.sums["row_steps"]
        return {name: self.sums[name] / max(steps, 1) for name in self.NAMES} | {"row_steps": steps}

    @property
    def scored(self) -> float | None:
        """The share that the score chose; None where nothing was let go."""
        return self.sums["chosen"] / self.sums["chosen_steps"] if self.sums["chosen_steps"] else None


def shares_held(cache, wanted: list[list[int]]) -> list[list[float]]:
    """For tokens of each row, by number, the share of layers and KV heads that hold them."""
    most = max(max(row, default=0) for row in wanted)
    asked = torch.tensor([[*row, *[-1] * (max(map(len, wanted)) - len(row))] for row in wanted])
    layers = cache.attending
    total = sum(_there(layer.positions, asked, most) for layer in layers) if layers else None
    if total is None:
        return [[] for _ in wanted]
    shares = (total / len(layers)).tolist()
    return [[round(share, 3) for share in found[: len(row)]] for found, row in zip(shares, wanted)]


def _there(positions: Tensor, asked: Tensor, most: int) -> Tensor:
    """The share of heads that hold each token `[batch, asked]`; positions `[batch, kv_heads, slots]`."""
    held = torch.zeros(*positions.shape[:2], most + 2, device=positions.device)
    held.scatter_(2, (positions + 1).clamp(max=most + 1) * (positions <= most), 1.0)
    held[..., 0] = 0  # empty slots, and tokens behind those that are asked about
    where = (asked.to(positions.device) + 1)[:, None].expand(-1, positions.shape[1], -1)
    return held.gather(2, where).mean(1).cpu()


def steps_at_once(cache) -> bool:
    """Whether a pass over known tokens is, to rounding, what a step for each of them would be: nothing more
    goes, every token is written by itself and attended to as it is stored, everything is read, and each takes
    the same bytes. Asked after the prefill."""
    return isinstance(cache, KVCache) and cache.continues and all(map(_settled, cache.layers))


def _settled(layer) -> bool:
    if type(layer) is not Layer or layer.local is not None or layer.in_prompt:
        return False
    keep, place, store = layer.keep, layer.place.policy, layer.store.policy
    stays = not keep.policy.evicts or keep.on_top or keep.policy.prompt_only
    return stays and type(place) is Device and type(store) in (Growing, Static) and layer.store.exact is None


def until_rows_end(steps: Tensor, first: int) -> int:
    """The column before which a pass over known tokens stops, that begins at column `first`: where half of
    the rows have ended, if they would be padded by more than another pass costs; else where all have.
    steps `[rows]`: the column at which each ends."""
    ends, longest = steps.sort().values, int(steps.max())
    for gone in range((len(ends) + 1) // 2, len(ends)):
        end = int(ends[gone - 1])
        if first < end < longest and gone * (longest - end) > PASS:
            return end
    return longest


def pad_left(rows: Sequence[Sequence[int]], fill: int, device) -> tuple[Tensor, Tensor | None]:
    """Rows of token ids -> (ids `[batch, longest]`, mask alike or None when nothing is padded)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[fill] * (longest - len(row)) + list(row) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()


def pad_right(rows: Sequence[Sequence[int]], fill: int, device) -> Tensor:
    """Rows of token ids -> ids `[batch, longest]`."""
    longest = max(map(len, rows))
    return torch.tensor([list(row) + [fill] * (longest - len(row)) for row in rows], device=device)


def picked(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability, is it the arg max) of each target; logits `[..., V]`, targets `[...]`.

    Targets of -1 are not scored: 0 and True.
    """
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
    skipped = targets < 0
    return chosen.masked_fill(skipped, 0).double(), (logits.argmax(-1) == targets) | skipped


def pack(
    items: list,
    length: Callable,
    batch: int,
    rows=lambda item: 1,
    steps=None,
    longest=0,
    tokens=TOKENS,
    methods: int = 1,
) -> list:
    """Group items for one batch each, alike in prompt length or in `steps` (decode steps of an item).

    At most `batch` rows and `tokens` padded prompt tokens; with `steps` also at most `longest` columns,
    padding and steps together, since buffers may end there. A prompt of length 0 is never grouped with
    longer ones; an item too large for a group is alone. Prompts are padded to the longest of a group and
    answers to its most steps, and every group makes passes of its own: the groups are those that take the
    least work, where a prompt passes once and its steps once for each of so many methods. Without `steps`
    there are as few as can be, since whatever follows the prompts makes passes, too.
    """
    least = tokens if steps is None else PASS
    after, longest = steps or (lambda item: 0), longest if steps else tokens
    orders = length, lambda item: (length(item) > 0, after(item), length(item))
    found = []
    for order in orders[: 2 if steps else 1]:
        there = sorted(items, key=order, reverse=True)
        sizes = [(length(item), rows(item), after(item)) for item in there]
        work, cuts = _parted(sizes, batch, longest, tokens, methods, least)
        found.append((work, [there[begin:end] for begin, end in pairwise(cuts)]))
    return min(found, key=lambda one: one[0])[1]


def _parted(sizes: list, batch: int, longest: int, tokens: int, methods: int, least: int):
    """Where items of such sizes (prompt, rows, steps) are parted, in their order, for the least work; what
    that is, in tokens; `least`: a pass's, however few it has."""
    best = [(0, 0)]  # up to here: the least work, and where the last group of it begins
    for end in range(1, len(sizes) + 1):
        wide = held = most = 0
        ways = []
        for begin in reversed(range(end)):
            prompt, some, steps = sizes[begin]
            wide, held, most = max(wide, prompt), held + some, max(most, steps)
            room = held <= batch and (end - begin) * wide <= tokens and wide + most <= longest
            if ways and not (room and (prompt == 0) == (sizes[end - 1][0] == 0)):
                break
            passed = (end - begin) * wide + methods * held * most + least * (1 + methods * most)
            ways.append((best[begin][0] + passed, begin))
        best.append(min(ways))
    cuts = [len(sizes)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return best[-1][0], cuts[::-1]


def metric_row(metric: str, value: float, stderr: float | None, n: int, higher_is_better: bool) -> dict:
    """One metric of a cell."""
    return {"metric": metric, "value": value, "stderr": stderr, "n": n, "higher_is_better": higher_is_better}
