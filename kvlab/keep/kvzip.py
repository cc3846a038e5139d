"""KVzip: keep what the model attends to when it repeats the prompt (Kim et al. 2025, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import most_received
from ..models import tokenizer_of
from ..named import named
from ..parameters import check_one_of, check_whole
from ..ranks import all_heads, own_heads
from .base import Keep, counts

FIRST = "\n\nRepeat the previous context exactly.\n"
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
BEFORE = 8  # tokens of the previous chunk, which show where a later chunk starts
LEAST = 16  # tokens of a chunk, where the model's context leaves little room


@named(
    "kvzip",
    "What the model looks at when it reads the prompt once more, and all tokens after the prompt.",
    "Kim et al. 2025", same="budget=1000", less="budget=0.4", look="purple * -",
    technique="eviction by attention", takes=("turns",),
)  # fmt: skip
@dataclass(frozen=True)
class KVzip(Keep):
    """After the prompt, let the model read it again, as if it repeated it, and keep the tokens that it then
    attends to. No question is used, so the kept tokens serve any question.

    Definition: the prompt is fed again chunk by chunk, behind an instruction and, from the second chunk on,
    the 8 tokens before it; these passes see all tokens held and store nothing. The score of a token, per
    layer and KV head, is the largest weight that any fed query of the group gives it, in the softmax over the
    first `sinks` tokens, its own chunk and what was fed. The best tokens of all layers and heads stay, in
    total the number of heads times the budget; the first `sinks` tokens and the newest always stay. Tokens
    written after the prompt all stay.

    budget: tokens of the prompt held, mean over layers and heads (see `Keep`). over: what shares a threshold:
    "model" (the paper's), "layer", or "head" (every head holds the same number: any buffer will do).
    chunk: tokens fed at a time, fewer if the model's context has no room for them. sinks: first tokens that
    stay (the paper keeps a system prompt; 4 as in kvpress). turns: "first" for chats, whose later turns then
    all stay (see `Keep`); otherwise a later turn is refused.
    Deviations: the instruction is fed, without a chat template, if `kvlab.load` knows the model's tokenizer;
    otherwise the model reads the chunks alone. A window does not limit which held token is scored.
    State: `scores` `[batch, kv_heads, slots]`, until the prompt is compressed.
    """

    over: str = "model"
    chunk: int = 2000
    sinks: int = 4

    once = rereads = True
    per_slot = ("scores",)

    def __post_init__(self):
        super().__post_init__()
        check_one_of("over", self.over, ("model", "layer", "head"))
        check_whole("chunk", self.chunk, LEAST)

    @property
    def ragged(self) -> bool:
        return self.over != "head"

    def again(self, layer, model, ids: Tensor, real: Tensor) -> Iterator[tuple]:
        """Each pass also yields the bounds of each row's chunk, (start, end), `[batch, 1, 1]` each."""
        tokenizer = tokenizer_of(model)
        said = [[] if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)
                for text in (FIRST, LATER, "\n")]  # fmt: skip
        texts = [row[there].tolist() for row, there in zip(ids, real, strict=True)]
        rows = [list(self._parts(text, said, layer.shape.context)) for text in texts]
        for index in range(max(map(len, rows))):
            parts = [row[index] if index < len(row) else ([], 0, 0) for row in rows]
            width = max(len(fed) for fed, _, _ in parts)
            fed = torch.tensor([one + [0] * (width - len(one)) for one, _, _ in parts], device=ids.device)
            there = [[at < len(one) for at in range(width)] for one, _, _ in parts]
            spans = torch.tensor([part[1:] for part in parts], device=ids.device).view(-1, 2, 1, 1)
            yield fed, torch.tensor(there, device=ids.device), spans.unbind(1)

    def _parts(
        self, text: list[int], said: list, context: int | None
    ) -> Iterator[tuple[list[int], int, int]]:
        """(What is fed, start, end) for every chunk of a row's own tokens."""
        first, later, end_of_line = said
        chunk = self.chunk
        if context is not None:
            room = context - len(text) - max(len(first), len(later) + BEFORE + len(end_of_line))
            chunk = min(chunk, room)
        if chunk < min(LEAST, len(text)):
            raise ValueError(
                f"kvzip: a prompt of {len(text)} tokens leaves no room to be read again in the model's "
                f"context of {context}"
            )
        for start in range(0, len(text), chunk):
            end = min(start + chunk, len(text))
            lead = [*later, *text[start - BEFORE : start], *end_of_line] if start else first
            yield [*lead, *text[start:end]], start, end

    def hear(self, layer, given, asked: Tensor, positions: Tensor, part) -> None:
        (start, end), state = part, layer.state
        held = positions[..., : layer.slots]
        chunk = (held >= start) & (held < end)
        there = positions >= 0
        there[..., : layer.slots] &= chunk | (held < self.sinks)
        seen = there.flatten(0, 1).any(0).nonzero()[:, 0]  # by any row
        there, positions = there[..., seen], positions[..., seen]
        allowed = there[:, :, None] & (positions[:, :, None] <= asked[:, None, :, None])
        found = most_received(given, given.keys[:, :, seen], allowed)
        if state.scores is None:
            state.scores = found.new_zeros(*found.shape[:2], layer.slots)
        mine = seen[seen < layer.slots]
        before = state.scores[..., mine]
        state.scores[..., mine] = torch.where(chunk[..., mine], found[..., : len(mine)], before)

    def agree(self, layers) -> None:
        if self.over == "head":
            return
        ranked = [all_heads(layer, self.ranked(layer)) for layer in layers]
        rows = [[*map(min, self.limits(layer), layer.rows_held)] for layer in layers]
        heads = layers[0].ranks * layers[0].kv_heads
        limits = [heads * torch.tensor(row, device=x.device) for row, x in zip(rows, ranked, strict=True)]
        if self.over == "model":
            shares = counts(ranked, sum(limits))
        else:
            shares = [counts([score], limit)[0] for score, limit in zip(ranked, limits, strict=True)]
        for layer, share in zip(layers, shares, strict=True):
            layer.state.shares = own_heads(layer, share)

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        first = 1 + self.sinks - positions  # above every weight, and the first token before the second
        return torch.where(positions < self.sinks, first, layer.state.scores)

    def forget(self, state) -> None:
        state.scores = None
