"""Scoring through caches, in batches: token ids in, numbers out (see continuing.py, windows.py, writing.py).

The same for every method: continuations of a context (forked to its choices when they part) and
windows of known text (a part prefilled, the rest decoded). Rows of a batch are independent, so the
batch size changes no answer: the time, and the bytes that are held and moved, since padding is held too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

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
    shares_held,
    steps_at_once,
    until_rows_end,
)  # fmt: skip
from .clock import Clock
from .kept import Kept
from .prefill import shared
from .protocols import EVERY_STEP, INSIDE, ONCE, REUSE, families


class Scorer:
    """Scores through several caches at once, one per method, so that prefills are shared.

    caches: {method: cache}. Every result is {method: answers}, in the order of the requests; a method
    that fails is dropped and its error kept in `errors`. protocol, evict: see `protocols.py`; `reusing`:
    {method: what `reuse.reusing` made}. `prefilled` counts the tokens of the prompts, or of their
    contexts, that went through a prefill, which several methods may share; `contexts` and `tokens` count for
    each method what it was filled from. `clock` knows the seconds of each method and those that all share.

    To be set before it scores: `advance(items)`, called as requests are finished by all methods; `kept` and
    `name`, where finished batches are kept, and what their lines are called; `sought`, {request: tokens of
    its prompt, by number}: then `held` says, method by method, what share of the layers and heads held each
    of them.
    """

    def __init__(
        self, model, caches: dict, batch_size: int, max_length: int, *,
        protocol: str = INSIDE, evict: str = EVERY_STEP, reusing: dict | None = None,
    ):  # fmt: skip
        self.model, self.caches = model, dict(caches)
        self.protocol, self.evict, self.reusing = protocol, evict, reusing or {}
        self.advance: Callable[[int], None] = lambda items: None
        self.kept, self.name = Kept(), ""
        self.sought: dict[int, list[int]] = {}
        self.held: dict[str, dict[int, list[float]]] = {name: {} for name in caches}
        self.members: list[int] = []  # the requests of the batch that is computed now
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

        score(name, stepper, logits `[rows, V]`, rows) -> what each of these rows answers; returns {method:
        answers of all rows}. `recompute` has nothing to prefill: it gets a fresh stepper and no logits, and
        makes its own passes. known: so many tokens that are known follow at most; then a cache whose steps
        pass `at_once` gets no logits either, and its last TAIL tokens are still to be fed.
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
                    found[method] = score(method, Stepper(self.model, cache), None, [*range(len(prompts))])
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
            self._look(name, stepper, [[place] for place in range(len(prompts))])
            end = self._end(name, stepper, prompts, known) if tail else logits
            return score(name, stepper, end, [*range(len(prompts))])

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

        def ask(name: str, stepper: Stepper, rows: list[int]) -> list:
            """These rows' questions, and what follows them."""
            here = [rest[row] for row in rows]
            # never one column, which would be a decode step to a place on the host, in some batches only
            wide = max(map(len, here)) if stepper.cache.gapless else max(2, *map(len, here))
            if any(here):
                question, real = (part[:-2] for part in pad_left([*here, [0] * wide, []], 0, self.device))
                stepper.feed(question, attention_mask=None if bool(real.all()) else real, last=True)
            return score(name, stepper, self._end(name, stepper, [prompts[row] for row in rows], known), rows)

        def go_on(name: str, stepper: Stepper, logits: Tensor) -> list:
            if self.evict == ONCE:
                stepper.cache.hold()
            self._look(name, stepper, asked)
            if not stepper.cache.gapless:
                if len(asked) < len(prompts):
                    stepper.fork(owner.to(self.device))
                return ask(name, stepper, [*range(len(prompts))])
            answers: list = [None] * len(prompts)
            for length in {*map(len, rest)}:  # no padding between a context and a question
                rows = [row for row, one in enumerate(rest) if len(one) == length]
                part = stepper.copied()
                part.fork(owner[rows].to(self.device))
                for row, answer in zip(rows, ask(name, part, rows), strict=True):
                    answers[row] = answer
            return answers

        return self.each(caches, ids, mask, True, go_on)

    def answered(self, count: int, batches: Iterable[list[int]], compute: Callable, size=len) -> dict:
        """{method: its answers to so many requests}. batches: the requests by number, some at a time, for
        which `compute(members)` gives {method: an answer of each}, unless these are kept. size: members ->
        how many requests are finished with them."""
        answers: dict[str, list] = {name: [None] * count for name in self.caches}
        for members in batches:
            self.members = members
            found = self.kept.batch(self, self.name, members, partial(compute, members))
            for name in found.keys() - self.errors.keys():
                for index, answer in zip(members, found[name], strict=True):
                    answers[name][index] = answer
            self.advance(size(members))
        return {name: answers[name] for name in self.caches}

    def _look(self, name: str, stepper: Stepper, asked: list[list[int]]) -> None:
        """Note which of the sought tokens a compressed cache holds; asked: the places in the batch that every
        row of it is for."""
        wanted = [[self.sought.get(self.members[place], []) for place in row] for row in asked]
        if not any(map(any, wanted)):
            return
        with self.clock.of(None):
            found = shares_held(stepper.cache, [[*chain(*tokens)] for tokens in wanted])
            for places, tokens, shares in zip(asked, wanted, map(iter, found), strict=True):
                for place, some in zip(places, tokens, strict=True):
                    self.held[name][self.members[place]] = [*islice(shares, len(some))]

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

    def passes(self, stepper: Stepper, texts: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole texts, in passes of their own, for `recompute`, which stores nothing: the numbers of some,
        and their logits `[rows, tokens, V]`, padded at the left."""
        size = max(1, LOGITS // self.vocabulary // max(map(len, texts)))
        for part in torch.arange(len(texts)).split(size):
            ids, mask = pad_left([texts[row] for row in part.tolist()], 0, self.device)
            yield part, Stepper(self.model, stepper.cache).feed(ids, attention_mask=mask)

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
