"""Decoding: feed tokens through a cache, and the laboratory's own greedy loop with a trace per step."""

from __future__ import annotations

import copy
import inspect
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from .devices import entry_of
from .late import Late
from .models import ModelShape, Switch, cache_name
from .models.shape import check_ids, check_mask, check_model, forgetful, other_model
from .parameters import check_kind, check_rows, shown
from .visibility import own_positions


class Stepper:
    """Feeds tokens to a model through a cache and returns logits.

    One interface for every method, including `recompute`, which has no cache and feeds everything again. A
    cache that was loaded, or filled by hand, is continued; its padding must be on the left. Raises ValueError
    for a cache of another model, ids outside the vocabulary, an empty prompt, more tokens than the model's
    context, and logits that are NaN; RuntimeError for a cache fed by a pass elsewhere. Refused tokens are not
    fed.
    """

    def __init__(self, model, cache):
        check_model(model)
        if not hasattr(cache, "check_whole"):
            check_kind("cache", cache, (), "a cache of kvlab.make_cache(model, ...)")
        if cache.model is not model:
            raise ValueError(other_model(cache.model))
        if model.get_output_embeddings() is None:
            raise ValueError(
                f"model is a {type(model).__name__}, which gives no logits: expected one with a head"
            )
        self.model, self.cache = model, cache
        shape = ModelShape.of(model)
        self.context, self.vocabulary = shape.context, shape.vocabulary
        self.ids: Tensor | None = None  # all tokens fed here, [batch, tokens]
        self.mask: Tensor | None = None  # 1 for real tokens, including those already in the cache
        self.padded, self.late = False, Late()
        if not cache.fed and (held := cache.get_seq_length()):
            lengths = torch.tensor(cache.lengths, device=entry_of(model))[:, None]
            self.ids = lengths.new_empty(len(lengths), 0)
            self.mask = (torch.arange(held, device=entry_of(model)) >= held - lengths).long()
            self.padded = not bool(self.mask.all())
        self._named, self._accepted = cache_name(model), {*inspect.signature(model.forward).parameters}

    def copied(self) -> Stepper:
        """A copy that continues from here with its own cache."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    @torch.no_grad()
    def feed(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        last: bool = False,
        chunk: int | None = None,
    ) -> Tensor:
        """Feed new tokens `[batch, tokens]`; returns fp32 logits `[batch, tokens, vocabulary]`, or those of
        the last position, `[batch, vocabulary]`, with `last`. The first feed is the prompt, and later ones,
        of however many tokens, continue the text (a chat's turns: see `turns.py`).

        attention_mask: which of the new tokens are real, `[batch, tokens]` (default: all). The first feed
        is the prefill; it may be padded, on the left if its last logits are used. chunk: tokens of the prompt
        per pass (default: all; half of them, and so on, if the device's memory does not suffice). Between
        chunks K and V go to the cache's place, so the device holds the activations of one chunk and, over a
        link, K and V of two layers; the prompt then attends to earlier chunks in their stored form, and
        nothing is evicted before its end. To feed a prompt in several calls, put them into `with
        cache.prefill():`.
        """
        check_kind("last", last, bool, "true or false")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 2):
            raise ValueError(f"chunk={shown(chunk)}: expected at least 2 tokens")
        before = self.ids, self.mask, self.padded
        self._check_cache()
        try:
            self._append(ids, attention_mask)
            if before[0] is None and not self.cache.recompute:
                logits = self._prompt(chunk or ids.shape[1], last)
            else:
                fresh = 0 if self.cache.recompute else self.mask.shape[1] - ids.shape[1]
                logits = self._pass(fresh, self.mask.shape[1], ids.shape[1], last)
            self._check_finite(logits, prompt=before[0] is None)
        except BaseException:
            self.ids, self.mask, self.padded = before
            raise
        return logits[:, -1] if last else logits

    def _pass(self, start: int, end: int, count: int, last: bool) -> Tensor:
        """Tokens start..end through the model: logits of the last `count` positions, or of one."""
        came = self.mask.shape[1] - self.ids.shape[1]  # tokens already in the cache at the start
        ids, mask, order = self.ids[:, start - came : end - came], self.mask[:, :end], None
        if self.padded and self.cache.recompute:  # which counts padding as tokens in windows and states
            order = mask.argsort(stable=True, dim=1)
            ids, mask = ids.gather(1, order), mask.gather(1, order)
        inputs = {"input_ids": ids, "use_cache": not self.cache.recompute}
        if self.padded:
            inputs["attention_mask"] = mask
            if "position_ids" in self._accepted:
                inputs["position_ids"] = own_positions(mask)[:, start:end].clamp(min=0)
        elif "position_ids" in self._accepted:
            inputs["position_ids"] = torch.arange(start, end, device=self.ids.device)[None]
        if self.cache.recompute:  # other caches check this themselves
            Switch(self.model).check_lengths(self.mask[:, :end].sum(-1).tolist())
        if "logits_to_keep" in self._accepted:
            inputs["logits_to_keep"] = 1 if last else count
        if not self.cache.recompute:
            inputs[self._named] = self.cache
        forward = getattr(self.cache, "forward", self.model)  # an engine of its own, or the model
        self.cache.stepped = True
        try:
            logits = forward(**inputs).logits[:, -count:].float()
        finally:
            self.cache.stepped = False
        if order is None:
            return logits
        places = order.argsort(1)[:, -logits.shape[1] :] - (end - logits.shape[1])
        return logits.gather(1, places.clamp(min=0)[..., None].expand_as(logits))

    def _prompt(self, chunk: int, last: bool) -> Tensor:
        """The prompt in chunks; in smaller ones if the device's memory does not suffice."""
        length = self.ids.shape[1]
        if chunk < length and not self.cache.continues:
            raise ValueError(forgetful(self.model))
        while True:
            starts, found = list(range(0, length, chunk)), []
            try:  # a single pass is a whole prompt, and each layer compresses at once
                with self.cache.prefill() if len(starts) > 1 else nullcontext():
                    for start, end in zip(starts, [*starts[1:], length], strict=True):
                        found.append(self._pass(start, end, end - start, last))
                return found[-1] if last else torch.cat(found, 1)
            except torch.OutOfMemoryError:
                self.cache.reset()
                if chunk <= 16 or not self.cache.continues:
                    raise
            chunk = min(chunk, length) // 2

    def fork(self, rows: Tensor) -> None:
        """Row i becomes a copy of the old row `rows[i]`: one prompt to K continuations with zeros(K). Raises
        ValueError before anything was fed."""
        if self.ids is None:
            raise ValueError("fork: no tokens were fed here")
        check_rows("rows", rows, len(self.ids))
        self._check_cache()
        self.cache.reorder_cache(rows)
        self.ids = self.ids.index_select(0, rows.to(self.ids.device))
        self.mask = self.mask.index_select(0, rows.to(self.mask.device))

    def _check_cache(self) -> None:
        """RuntimeError if the cache holds other tokens than those fed here."""
        self.cache.check_whole()
        if self.cache.recompute:
            return
        held = self.cache.get_seq_length()
        fed = 0 if self.mask is None else self.mask.shape[1]
        if held != fed:
            raise RuntimeError(
                f"the cache has seen {held} tokens, but {fed} were fed here: the last pass broke off, or "
                "came from elsewhere; start again with cache.reset() and a new Stepper"
            )

    def _append(self, ids: Tensor, mask: Tensor | None) -> None:
        check_ids(ids, self.vocabulary)
        if self.ids is not None and len(ids) != len(self.ids):
            raise ValueError(f"batch of {len(ids)} rows, but {len(self.ids)} were fed before: use fork(rows)")
        padded = self.padded
        if mask is None:
            mask = torch.ones_like(ids)
        else:
            check_mask(mask, ids)
            mask = mask.to(ids)
            padded = padded or not bool(mask.all())
        all_ids = ids if self.ids is None else torch.cat([self.ids, ids], dim=1)
        all_mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        first = self.mask is None or any(layer.in_prompt for layer in getattr(self.cache, "attending", ()))
        if first and padded and not self.cache.prefilling and not bool(all_mask.any(-1).all()):
            raise ValueError("attention_mask: a row holds no token at all (an empty prompt)")
        longest = int(all_mask.sum(-1).max()) if padded else all_ids.shape[1]
        if self.ids is None or not self.cache.renumbers:
            self.check_room(longest)
        self.ids, self.mask, self.padded = all_ids, all_mask, padded

    def check_room(self, tokens: int) -> None:
        """ValueError for a row of more tokens than the model's context."""
        if self.context is not None and tokens > self.context:
            raise ValueError(f"{tokens} tokens are more than the model's context of {self.context}")

    def _check_finite(self, logits: Tensor, prompt: bool) -> None:
        """ValueError for logits `[batch, tokens, vocabulary]` of real tokens that are NaN or infinite; for a
        step on a GPU, which does not wait, this comes with the next step."""
        bad = ~(logits.amax(-1) - logits.amin(-1)).isfinite()
        if self.padded:
            bad &= self.mask[:, -bad.shape[1] :].bool()
        self.late.settle(bad, self._refuse, at_once=prompt)

    def _refuse(self) -> NoReturn:
        for name, weight in self.model.named_parameters():
            if not (weight.is_meta or torch.isfinite(weight).all()):  # accelerate has put it elsewhere
                raise ValueError(f"the model's logits are not finite: weight {name!r} holds NaN or infinity")
        raise ValueError("the model's logits are not finite, though its weights are: try dtype=float32")


@dataclass
class Trace:
    """The result of `decode`. Lists have one entry per generated token; entry 0 is the prefill's."""

    tokens: Tensor  # [batch, n]
    logprobs: Tensor  # [batch, n], log-probability of each generated token, fp32
    ms: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=list)
    tokens_held: list[int] = field(default_factory=list)


def decode(
    model, input_ids: Tensor, cache, max_new_tokens: int, attention_mask: Tensor | None = None
) -> Trace:
    """Greedy decoding of `max_new_tokens` tokens through a fresh cache, with time and bytes per step.

    input_ids `[batch, tokens]`, attention_mask the same shape for a left-padded batch. Generation does not
    stop at an end token. Raises ValueError as `Stepper` does, for a row that ends with padding, and for a
    cache already in use.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={shown(max_new_tokens)}: expected a positive number")
    stepper = Stepper(model, cache)
    check_ids(input_ids, stepper.vocabulary)
    if cache.get_seq_length():
        raise ValueError("the cache already holds tokens: call cache.reset() first")
    if attention_mask is not None:
        check_mask(attention_mask, input_ids)
        if bool((attention_mask.any(-1) & (attention_mask[:, -1] == 0)).any()):
            raise ValueError("attention_mask: a row ends with padding; expected padding on the left")
    elif not cache.renumbers:
        stepper.check_room(input_ids.shape[-1] + max_new_tokens - 1)
    tokens, logprobs, trace = [], [], Trace(None, None)
    ids, mask = input_ids.to(entry_of(model)), attention_mask
    for _ in range(max_new_tokens):
        start = now(entry_of(model))
        logits = stepper.feed(ids, mask, last=True)
        ids = logits.argmax(-1, keepdim=True)
        trace.ms.append((now(entry_of(model)) - start) * 1e3)
        tokens.append(ids)
        logprobs.append(logits.log_softmax(-1).gather(1, ids))
        stats, mask = cache.stats(), None
        for name in ("device_bytes", "host_bytes", "moved_bytes", "tokens_held"):
            getattr(trace, name).append(stats[name])
    trace.tokens, trace.logprobs = torch.cat(tokens, 1), torch.cat(logprobs, 1)
    return trace


def now(device: torch.device) -> float:
    """Seconds on the clock, when the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
