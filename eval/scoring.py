"""Scoring and generating through a cache, in batches: token ids in, numbers out.

The same three ways for every method: continuations of a context (forked to its choices when they
part), windows of known text (a part prefilled, the rest decoded) and greedy generation. Rows of a
batch are independent, so the batch size changes nothing but the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.decode import Stepper

from .prefill import shared

TAIL = 1  # context tokens that already go through the cache
TOKENS = 8192  # prompt tokens prefilled at once, padding included; few, to stay in the processor's cache
TOKENS_LONG = 32768  # the same where many tokens are decoded after the prefill: there rows count
LOGITS = 2**27  # logits held at once where those of every position are needed (0.5 GB in fp32)


class Meter:
    """Bytes per row and decode step, averaged over every decode step made."""

    NAMES = ("device_bytes", "host_bytes", "moved_bytes")

    def __init__(self):
        self.sums, self.row_steps = dict.fromkeys(self.NAMES, 0), 0

    def add(self, cache, rows: int) -> None:
        stats = cache.stats()
        for name in self.NAMES:
            self.sums[name] += int(getattr(stats, name))
        self.row_steps += rows

    def join(self, other: Meter) -> None:
        self.row_steps += other.row_steps
        for name in self.NAMES:
            self.sums[name] += other.sums[name]

    def means(self) -> dict[str, float]:
        """Mean bytes per row; `row_steps` says over how many rows and steps (0: nothing decoded)."""
        means = {name: total / max(self.row_steps, 1) for name, total in self.sums.items()}
        return means | {"row_steps": self.row_steps}


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
    items: list, length: Callable, batch: int, rows=lambda item: 1, steps=None, longest=0, tokens=TOKENS
) -> list:
    """Group items of similar prompt length for one batch each.

    At most `batch` rows and `tokens` padded prompt tokens; with `steps` (decode steps of an item) also at
    most `longest` columns, padding and steps together, since buffers may end there. A prompt of length
    0 is never grouped with longer ones; an item too large for a group stands alone.
    """
    groups: list[list] = []
    first = held = after = 0
    total = sum(map(rows, items))
    batch = math.ceil(total / math.ceil(total / batch))  # as few groups, of even size
    for item in sorted(items, key=length, reverse=True):
        fits = bool(groups) and held + rows(item) <= batch and (len(groups[-1]) + 1) * first <= tokens
        after = max(after, steps(item)) if steps else 0
        if not fits or (length(item) == 0) != (first == 0) or (steps and first + after > longest):
            groups.append([])
            first, held, after = length(item), 0, steps(item) if steps else 0
        groups[-1].append(item)
        held += rows(item)
    return groups


class Scorer:
    """Scores through several caches at once, one per method, so that prefills are shared.

    caches: {method: cache}. Every result is {method: answers}, in the order of the requests; a method
    that fails is dropped and its error kept in `errors`. `advance(items)` is called as requests are
    finished by all methods.
    """

    def __init__(self, model, caches: dict, batch_size: int, max_length: int, advance=lambda items: None):
        self.model, self.caches, self.advance = model, dict(caches), advance
        self.batch_size, self.max_length = batch_size, max_length
        self.device = next(model.parameters()).device
        self.vocabulary = model.config.get_text_config().vocab_size
        self.meters = {name: Meter() for name in caches}
        self.errors: dict[str, Exception] = {}

    def _each(self, caches: dict, ids: Tensor, mask: Tensor | None, last: bool, score: Callable) -> dict:
        """{method: score(name, stepper, logits)} after the prefill of one batch."""
        found = {}
        for name, stepper, logits in shared(self.model, caches, ids, mask, last):
            try:
                if isinstance(logits, Exception):
                    raise logits
                found[name] = score(name, stepper, logits)
            except Exception as error:
                self.errors[name] = error
        for name in self.errors:
            self.caches.pop(name, None)
        return found

    def _prompt(self, prompts: list[Sequence[int]], score: Callable) -> dict:
        """Prefill all but the last TAIL tokens and feed those through each cache.

        score(name, stepper, logits `[batch, V]`) -> result; returns {method: result}.
        """
        tail = 0 if len(prompts[0]) == TAIL else TAIL  # where nothing would be left to prefill
        ids, mask = pad_left([prompt[: len(prompt) - tail] for prompt in prompts], 0, self.device)
        final = torch.tensor([prompt[-1] for prompt in prompts])

        def go_on(name: str, stepper: Stepper, logits: Tensor):
            return score(name, stepper, self._step(name, stepper, final) if tail else logits)

        return self._each(self.caches, ids, mask, True, go_on)

    def _step(self, name: str, stepper: Stepper, tokens: Tensor) -> Tensor:
        """One decode step: tokens `[batch]` -> logits `[batch, V]`; its bytes are metered."""
        logits = stepper.feed(tokens.to(self.device)[:, None], last=True)
        self.meters[name].add(stepper.cache, len(tokens))
        return logits

    def _thin(self, stepper: Stepper, wanted: Tensor, ends: Tensor) -> Tensor | None:
        """Drop finished rows from the cache when half are, or when one would outgrow the model.

        wanted: bool `[rows]`; ends: the position each row's next token takes. Returns the rows kept.
        """
        outgrown = bool((~wanted & (ends >= self.max_length)).any())
        if 2 * int(wanted.sum()) > len(wanted) and not outgrown:
            return None
        rows = wanted.nonzero()[:, 0]
        stepper.fork(rows.to(self.device))
        return rows

    @torch.inference_mode()
    def continuations(self, groups: list[tuple[Sequence[int], list[list[int]]]]) -> dict[str, list[list]]:
        """Log-likelihoods of each context's continuations.

        groups: (context ids, continuations). An answer is, per group, a list of (sum of
        log-probabilities, whether greedy decoding would give it), in the order given.
        """
        answers: dict[str, list] = {name: [None] * len(groups) for name in self.caches}
        packed = pack(
            list(enumerate(groups)),
            length=lambda item: len(item[1][0]) - TAIL,
            batch=self.batch_size,
            rows=lambda item: max(1, sum(len(targets) > 1 for targets in item[1][1])),
            steps=lambda item: max(map(len, item[1][1])),
            longest=self.max_length,
        )
        for part in packed:
            batch = [group for _, group in part]
            found = self._prompt(
                [context for context, _ in batch],
                lambda name, stepper, logits: self._continue(name, stepper, logits, batch),  # noqa: B023
            )
            for name, scores in found.items():
                queue = iter(scores)
                for index, (_, targets) in part:
                    answers[name][index] = [next(queue) for _ in targets]
            self.advance(sum(len(targets) for _, targets in batch))
        return {name: answers[name] for name in self.caches}

    def _continue(self, name: str, stepper: Stepper, logits: Tensor, batch: list) -> list:
        owner = torch.tensor([row for row, (_, targets) in enumerate(batch) for _ in targets])
        targets = pad_right([t for _, targets in batch for t in targets], -1, "cpu")
        starts = torch.tensor([len(context) for context, _ in batch])[owner]
        total, greedy = picked(logits.cpu()[owner], targets[:, 0])
        active = (targets[:, 1:2] >= 0).any(1).nonzero()[:, 0]  # rows that go on after one token
        if len(active) and stepper.cache.recompute:  # nothing is stored: one pass over known tokens
            flat = [(context, t) for context, targets in batch for t in targets]
            rows = [([*flat[row][0], *flat[row][1][:-1]], flat[row][1]) for row in active.tolist()]
            alone = Scorer(self.model, {name: stepper.cache}, self.batch_size, self.max_length)
            for row, (score, hit) in zip(active.tolist(), alone.windows(rows)[name], strict=True):
                total[row], greedy[row] = score, hit
            return list(zip(total.tolist(), greedy.tolist(), strict=True))
        if len(active):
            stepper.fork(owner[active].to(self.device))
        for step in range(1, targets.shape[1]):
            wanted = targets[active, step] >= 0
            kept = self._thin(stepper, wanted, starts[active] + step - 1)
            active = active if kept is None else active[kept]
            fed = targets[active, step - 1].clamp(min=0)
            chosen, hit = picked(self._step(name, stepper, fed).cpu(), targets[active, step])
            total[active] += chosen
            greedy[active] &= hit
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    @torch.inference_mode()
    def windows(self, rows: list[tuple[list[int], list[int]]], prefilled: float = 1.0) -> dict[str, list]:
        """Score known text: (inputs, targets), the targets belonging to the last inputs.

        The first `prefilled` of the inputs are prefilled and scored from the prefill, the others are
        decoded one by one (1.0: one pass, nothing decoded; `recompute` stores nothing and is always
        scored so). An answer is (log-likelihood, is it greedy).
        """
        answers: dict[str, list] = {name: [None] * len(rows) for name in self.caches}
        most = LOGITS / self.vocabulary / max(len(inputs) for inputs, _ in rows)
        batch = max(1, min(self.batch_size, int(most)))
        for part in pack(list(enumerate(rows)), lambda item: len(item[1][0]), batch, tokens=TOKENS_LONG):
            texts = [row for _, row in part]
            lasting = {name: cache for name, cache in self.caches.items() if not cache.recompute}
            passing = {name: cache for name, cache in self.caches.items() if cache.recompute}
            found = self._window(lasting, texts, prefilled) | self._window(passing, texts, 1.0)
            for name, scores in found.items():
                for (index, _), score in zip(part, scores, strict=True):
                    answers[name][index] = score
            self.advance(len(part))
        return {name: answers[name] for name in self.caches}

    def _window(self, caches: dict, rows: list, prefilled: float) -> dict[str, list[tuple[float, bool]]]:
        full = [[-1] * (len(inputs) - len(targets)) + list(targets) for inputs, targets in rows]
        cut = [max(1, int(prefilled * len(inputs))) for inputs, _ in rows]
        ids, mask = pad_left([row[0][:c] for row, c in zip(rows, cut, strict=True)], 0, self.device)
        first, _ = pad_left([t[:c] for t, c in zip(full, cut, strict=True)], -1, self.device)
        inputs = pad_right([row[0][c:] for row, c in zip(rows, cut, strict=True)], 0, "cpu")
        targets = pad_right([t[c:] for t, c in zip(full, cut, strict=True)], -1, "cpu")
        left = torch.tensor([len(t) - c for t, c in zip(full, cut, strict=True)])
        known: list = [None, None]  # logits of the shared prefill, and what was picked from them

        def score(name: str, stepper: Stepper, logits: Tensor) -> list:
            if known[0] is not logits:
                known[:] = logits, picked(logits, first)
            total, greedy = known[1][0].sum(1).cpu(), known[1][1].all(1).cpu()
            active = torch.arange(len(rows))
            for step in range(inputs.shape[1]):
                kept = self._thin(stepper, left[active] > step, torch.tensor(cut)[active] + step)
                active = active if kept is None else active[kept]
                logits = self._step(name, stepper, inputs[active, step]).cpu()
                chosen, hit = picked(logits, targets[active, step])
                total[active] += chosen
                greedy[active] &= hit
            return list(zip(total.tolist(), greedy.tolist(), strict=True))

        return self._each(caches, ids, mask, False, score)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], limit: int, stop: Callable) -> dict[str, list[list[int]]]:
        """Greedy tokens for each prompt: at most `limit`, until `stop(tokens)` says it is enough."""
        made: dict[str, list] = {name: [[] for _ in prompts] for name in self.caches}
        for part in pack(list(enumerate(prompts)), lambda item: len(item[1]) - TAIL, self.batch_size):
            found = self._prompt(
                [prompt for _, prompt in part],
                lambda name, stepper, logits: self._write(name, stepper, logits, part, limit, stop),  # noqa: B023
            )
            for name, texts in found.items():
                for (index, _), tokens in zip(part, texts, strict=True):
                    made[name][index] = tokens
            self.advance(len(part))
        return {name: made[name] for name in self.caches}

    def _write(self, name: str, stepper: Stepper, logits: Tensor, part: list, limit: int, stop) -> list:
        made: list[list[int]] = [[] for _ in part]
        lengths = torch.tensor([len(prompt) for _, prompt in part])
        active = torch.arange(len(part))
        for count in range(1, limit + 1):
            tokens = logits.argmax(-1).cpu()
            for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
                if not made[row] or not stop(made[row]):
                    made[row].append(token)
            wanted = torch.tensor([not stop(made[row]) for row in active.tolist()])
            if count == limit or not wanted.any():
                break
            kept = self._thin(stepper, wanted, lengths[active] + count - 1)
            if kept is not None:
                active, tokens = active[kept], tokens[kept]
            logits = self._step(name, stepper, tokens)
        return made
