"""Scoring through caches, in batches: token ids in, numbers out (writing.py: greedy generation).

The same for every method: continuations of a context (forked to its choices when they part) and
windows of known text (a part prefilled, the rest decoded). Rows of a batch are independent, so the
batch size changes no answer: the time, and the bytes that are held and moved, since padding is held too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvlab.decode import Stepper
from kvlab.devices import entry_of
from kvlab.models import ModelShape

from .batching import (
    LOGITS,
    RECORDED,
    TAIL,
    TOKENS,
    TOKENS_LONG,
    Meter,
    pack,
    pad_left,
    pad_right,
    picked,
    steps_at_once,
    until_rows_end,
)  # fmt: skip
from .clock import Clock
from .prefill import shared
from .protocols import EVERY_STEP, INSIDE, ONCE, REUSE, families


class Scorer:
    """Scores through several caches at once, one per method, so that prefills are shared.

    caches: {method: cache}. Every result is {method: answers}, in the order of the requests; a method
    that fails is dropped and its error kept in `errors`. `advance(items)` is called as requests are
    finished by all methods. protocol, evict: see `protocols.py`; `reusing`: {method: what `protocols.reusing`
    made}. `prefilled` counts the tokens of the prompts, or of their contexts, that went through a prefill,
    which several methods may share; `contexts` and `tokens` count for each method what it was filled from.
    `clock` knows the seconds of each method and those that all share.
    """

    def __init__(
        self, model, caches: dict, batch_size: int, max_length: int, advance=lambda items: None, *,
        protocol: str = INSIDE, evict: str = EVERY_STEP, reusing: dict | None = None,
    ):  # fmt: skip
        self.model, self.caches, self.advance = model, dict(caches), advance
        self.protocol, self.evict, self.reusing = protocol, evict, reusing or {}
        self.prefilled, self.clock = 0, Clock()
        self.contexts, self.tokens = Counter(), Counter()
        self.batch_size, self.max_length = batch_size, max_length
        self.device = entry_of(model)
        self.vocabulary = model.config.get_text_config().vocab_size
        self.meters = {name: Meter() for name in caches}
        self.errors: dict[str, Exception] = {}

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens in one batch. One pass over them serves all caches, which then decode by turns: many
        rows cost a decode step hardly more than few, so there are as many as memory has room for."""
        if len(self.caches) == 1:
            return TOKENS
        shape = ModelShape.of(self.model)
        token = shape.layers * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * self.model.dtype.itemsize
        return min(TOKENS_LONG, max(TOKENS, RECORDED // token))

    def each(self, caches: dict, ids: Tensor, mask: Tensor | None, last: bool, score: Callable) -> dict:
        """{method: score(name, stepper, logits)} after the prefill of one batch."""
        found = {}
        for name, stepper, logits in shared(self.model, caches, ids, mask, last, self.clock):
            try:
                if isinstance(logits, Exception):
                    raise logits
                found[name] = score(name, stepper, logits)
            except Exception as error:
                self.errors[name] = error
        for name in self.errors:
            self.caches.pop(name, None)
        return found

    def prompt(
        self, prompts: list[Sequence[int]], score: Callable, cuts: list[int] | None = None, known: int = 0
    ) -> dict:
        """Prefill all but the last TAIL tokens and feed those through each cache; with `cuts`, tokens of each
        prompt's context, prefill the contexts and feed the questions, the last TAIL tokens by themselves.

        score(name, stepper, logits `[batch, V]`) -> result; returns {method: result}. `recompute` has
        nothing to prefill: it gets a fresh stepper and no logits, and makes its own passes. known: so many
        tokens that are known follow at most; then a cache whose steps pass `at_once` gets no logits either,
        and its last TAIL tokens are still to be fed.
        """
        lasting = {method: cache for method, cache in self.caches.items() if not cache.recompute}
        passing = {method: cache for method, cache in self.caches.items() if cache.recompute}
        if not lasting:
            found = {}
        elif cuts is None or not cuts[0]:
            found = self._inside(lasting, prompts, score, known)
        else:
            found = self._on_contexts(lasting, prompts, cuts, score, known)
        for method, cache in passing.items():
            try:
                with self.clock.of(method):
                    found[method] = score(method, Stepper(self.model, cache), None)
            except Exception as error:
                self.errors[method] = error
                del self.caches[method]
        return found

    def _end(self, name: str, stepper: Stepper, prompts: list, known: int) -> Tensor | None:
        """Feed every prompt's last token: logits `[batch, V]`; None where what follows takes it along."""
        if known and self.at_once(stepper, torch.tensor([len(prompt) for prompt in prompts]), known):
            return None
        return self.step(name, stepper, torch.tensor([prompt[-1] for prompt in prompts]))

    def _inside(self, caches: dict, prompts: list[Sequence[int]], score: Callable, known: int) -> dict:
        tail = 0 if len(prompts[0]) == TAIL else TAIL  # where nothing would be left to prefill
        ids, mask = self._padded([prompt[: len(prompt) - tail] for prompt in prompts], caches)

        def go_on(name: str, stepper: Stepper, logits: Tensor):
            if self.evict == ONCE:
                stepper.cache.hold()
            return score(name, stepper, self._end(name, stepper, prompts, known) if tail else logits)

        return self.each(caches, ids, mask, True, go_on)

    def _on_contexts(self, caches: dict, prompts: list, cuts: list[int], score: Callable, known: int) -> dict:
        """Compress each context once, ask every question of a fork."""
        asked = families(prompts, cuts, self.protocol)
        if self.protocol == REUSE:  # every question on what was held with the one before it inside
            others = {index: members[place - 1] for members in asked for place, index in enumerate(members)}
            self._hold_of_others(caches, [prompts[others[index]] for index in range(len(prompts))], cuts)
            caches = {
                name: self.reusing[name][0] if self.reusing.get(name) else caches[name] for name in caches
            }
            asked = [[index] for index in range(len(prompts))]
        contexts = [prompts[members[0]][: cuts[members[0]]] for members in asked]
        ids, mask = self._padded(contexts, caches)
        owner = torch.empty(len(prompts), dtype=torch.long)
        for place, members in enumerate(asked):
            owner[members] = place
        rest = [prompt[cut:-TAIL] for prompt, cut in zip(prompts, cuts, strict=True)]
        # never one column, which would be a decode step to a place on the host, in some batches only
        wide = max(2, *map(len, rest))
        question, real = (part[:-2] for part in pad_left([*rest, [0] * wide, [0]], 0, self.device))
        real = None if bool(real.all()) else real

        def go_on(name: str, stepper: Stepper, logits: Tensor):
            if self.evict == ONCE:
                stepper.cache.hold()
            if len(asked) < len(prompts):
                stepper.fork(owner.to(self.device))
            if any(rest):
                stepper.feed(question, attention_mask=real, last=True)
            return score(name, stepper, self._end(name, stepper, prompts, known))

        return self.each(caches, ids, mask, True, go_on)

    def _hold_of_others(self, caches: dict, prompts: list, cuts: list[int]) -> None:
        """Note which tokens of the contexts stay when these prompts are compressed whole."""
        choosing = {name: cache for name, cache in caches.items() if self.reusing.get(name)}
        if choosing:
            ids, mask = self._padded(prompts, choosing, contexts=0)
            contexts = torch.tensor(cuts)
            read = lambda name, stepper, logits: self.reusing[name][1].read(stepper.cache, contexts)
            self.each(choosing, ids, mask, True, read)

    def _padded(
        self, prompts: list[Sequence[int]], caches: dict, contexts: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """What is prefilled into these caches, counted; contexts: 0 where it is only chosen by, not asked."""
        read = sum(map(len, prompts))
        self.prefilled += read
        for name in caches:
            self.contexts[name] += contexts * len(prompts)
            self.tokens[name] += read
        return pad_left(prompts, 0, self.device)

    def step(self, name: str, stepper: Stepper, tokens: Tensor) -> Tensor:
        """One decode step: tokens `[batch]` -> logits `[batch, V]`; its bytes are metered."""
        logits = stepper.feed(tokens.to(self.device)[:, None], last=True)
        self.meters[name].add(stepper.cache, len(tokens))
        return logits

    def known(
        self, name: str, stepper: Stepper, ids: Tensor, steps: Tensor, skipped: Tensor | int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Decode steps whose tokens are known, in one pass, or in some, where rows end early or the logits
        are too many: yields (first step, rows that go on, their logits `[rows, steps, V]`). ids `[rows,
        steps]`; steps `[rows]`: how many are a row's own, those behind them being anything; skipped `[rows]`:
        see `Meter.add_pass`. Only where `at_once`."""
        active, first = torch.arange(len(ids)), 0
        skipped = torch.as_tensor(skipped).expand(len(ids))
        while first < int(steps.max()):
            rows = (steps[active] > first).nonzero()[:, 0]
            if len(rows) < len(active):
                stepper.fork(rows.to(self.device))
                active = active[rows]
            wide = max(1, LOGITS // self.vocabulary // len(active))
            last = min(first + wide, until_rows_end(steps[active], first))
            before = stepper.cache.stats()
            logits = stepper.feed(ids[active, first:last].to(self.device))
            own = [(count[active] - first).clamp(0, last - first) for count in (steps, skipped)]
            self.meters[name].add_pass(before, stepper.cache.stats(), last - first, *own)
            yield first, active, logits
            first = last

    @staticmethod
    def at_once(stepper: Stepper, starts: Tensor, count: int) -> bool:
        """Whether `known` may be used for so many more tokens; starts `[rows]`: each row's own so far."""
        room = stepper.context is None or int(starts.max()) + count <= stepper.context
        return room and steps_at_once(stepper.cache)

    def thin(self, stepper: Stepper, wanted: Tensor, ends: Tensor) -> Tensor | None:
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
    def continuations(
        self, groups: list[tuple[Sequence[int], list[list[int]]]], cuts: list[int] | None = None
    ) -> dict[str, list[list]]:
        """Log-likelihoods of each prompt's continuations.

        groups: (prompt ids, continuations). cuts: tokens of each prompt that are its context. An answer is,
        per group, a list of (sum of log-probabilities, whether greedy decoding would give it), in the order
        given.
        """
        answers: dict[str, list] = {name: [None] * len(groups) for name in self.caches}
        packed = self.packed(
            [prompt for prompt, _ in groups],
            cuts,
            rows=lambda index: max(1, len({tuple(targets[:-1]) for targets in groups[index][1]} - {()})),
            steps=lambda index: max(map(len, groups[index][1])),
        )
        for members in packed:
            part = [(index, groups[index]) for index in members]
            batch = [group for _, group in part]
            found = self.prompt(
                [prompt for prompt, _ in batch],
                lambda name, stepper, logits: self._continue(name, stepper, logits, batch),  # noqa: B023
                None if cuts is None else [cuts[index] for index in members],
                max(len(target) for _, targets in batch for target in targets),
            )
            for name, scores in found.items():
                queue = iter(scores)
                for index, (_, targets) in part:
                    answers[name][index] = [next(queue) for _ in targets]
            self.advance(sum(len(targets) for _, targets in batch))
        return {name: answers[name] for name in self.caches}

    def packed(
        self, prompts: list, cuts: list[int] | None, rows=lambda index: 1, steps=None
    ) -> list[list[int]]:
        """Prompts, by number, in batches (see `pack`); those that one prefill serves stay together."""
        context = [len(p) - TAIL for p in prompts] if cuts is None else cuts
        after = [0 if cuts is None else len(p) - c for p, c in zip(prompts, context, strict=True)]
        found = pack(
            families(prompts, cuts, self.protocol),
            length=lambda members: context[members[0]],
            batch=self.batch_size,
            rows=lambda members: sum(map(rows, members)),
            steps=steps and (lambda members: max(after[i] + steps(i) for i in members)),
            longest=self.max_length,
            tokens=self.prompt_tokens,
            methods=len(self.caches),
        )
        return [[index for members in part for index in members] for part in found]

    def _continue(self, name: str, stepper: Stepper, logits: Tensor, batch: list) -> list:
        """Continuations that feed the same tokens (all but their last) share a row."""
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
            self._pass_over(stepper, batch, list(place), score)
            active = active[:0]
        elif logits is None:
            self._at_once(name, stepper, batch, owner, fed, score)
            active = active[:0]
        else:
            score(0, active, logits.cpu()[owner])
            active = active[steps > 0]
        if len(active):
            stepper.fork(owner[active].to(self.device))
        for step in range(1, fed.shape[1] + 1 if len(active) else 0):
            kept = self.thin(stepper, steps[active] >= step, starts[active] + step - 1)
            active = active if kept is None else active[kept]
            tokens = fed[active, step - 1].clamp(min=0)
            score(step, active, self.step(name, stepper, tokens).cpu())
        answers = zip((total[row_of] + ends).tolist(), (greedy[row_of] & hits).tolist(), strict=True)
        return list(answers)

    def _at_once(self, name: str, stepper: Stepper, batch: list, owner: Tensor, fed: Tensor, score) -> None:
        """Every row's prompt ends and its tokens follow, in one pass; owner `[rows]`, fed `[rows, steps]`."""
        ends = torch.tensor([context[-1] for context, _ in batch])[owner]
        again = torch.cat([torch.zeros(1, dtype=torch.bool), owner[1:] == owner[:-1]])  # the same end
        tokens, steps = torch.cat([ends[:, None], fed.long().clamp(min=0)], 1), (fed >= 0).sum(1)
        stepper.fork(owner.to(self.device))
        for first, active, found in self.known(name, stepper, tokens, steps + TAIL, again.long()):
            for step in range(first, first + found.shape[1]):
                rows = (steps[active] >= step).nonzero()[:, 0]
                score(step, active[rows], found[rows.to(found.device), step - first].cpu())

    def _pass_over(self, stepper: Stepper, batch: list, rows: list, score: Callable) -> None:
        """`recompute` stores nothing: one pass over context and fed tokens gives every step's logits."""
        texts = [[*batch[owner][0], *fed] for owner, fed in rows]
        size = max(1, LOGITS // self.vocabulary // max(map(len, texts)))
        for part in torch.arange(len(rows)).split(size):
            ids, mask = pad_left([texts[row] for row in part.tolist()], 0, self.device)
            logits = Stepper(self.model, stepper.cache).feed(ids, attention_mask=mask)
            steps = torch.tensor([len(rows[row][1]) for row in part.tolist()])
            for step in range(int(steps.max()) + 1):
                here = (steps >= step).nonzero()[:, 0]
                score(step, part[here], logits[here, logits.shape[1] - 1 - (steps[here] - step)].cpu())
