"""What a row of a batch gives and holds alone, from a fresh cache or from transformers' own attention."""

import contextlib
from dataclasses import dataclass

import torch
from fuzz.cases import Case
from tiny import tiny

import kvlab
from kvlab.visibility import own_positions

PAD = -1


class Turn(tuple):
    """The tokens of a pass that was a later turn."""


@dataclass
class Row:
    """A row's own text: the pieces of its prompt and the passes after it, as tuples of tokens, `PAD` before
    those of a pass in which other rows have more."""

    pieces: tuple = ()
    passes: tuple = ()

    @property
    def fed(self) -> tuple:
        """The passes without padding."""
        real = (type(part)(token for token in part if token != PAD) for part in self.passes)
        return tuple(filter(None, real))

    @property
    def prompt(self) -> tuple:
        return tuple(token for piece in self.pieces for token in piece)

    @property
    def text(self) -> list[int]:
        return [token for part in (*self.pieces, *self.fed) for token in part]

    def shorten(self, count: int) -> None:
        """Take the last `count` tokens off its passes."""
        while count:
            *passes, last = self.passes
            self.passes, count = (*passes, *filter(None, [last[:-count]])), max(0, count - len(last))


class Alone:
    """What a row gives and holds alone."""

    def __init__(self, case: Case):
        self.case, self.known = case, {}

    def after(self, row: Row):
        """(logits `[tokens of the last pass, vocabulary]`, positions by layer and head or None)."""
        if self.case.lossless:
            return self._uncached(row), None
        passes = row.fed
        key = row.pieces, passes
        if key not in self.known:
            before = self.known.pop((row.pieces, passes[:-1]), None) if passes else None
            stepper = before[0] if before is not None else self._prompt(row)
            logits = before[1] if before is not None else stepper.first
            for tokens in passes[-1:] if before is not None else passes:
                turn, ids = isinstance(tokens, Turn), torch.tensor([tokens])
                logits = (bare(stepper, self.case.model, ids) if turn else stepper.feed(ids))[0]
                stepper.cache.stats()  # ends a turn, as `check` does
            if len(self.known) > 12:
                self.known.clear()
            self.known[key] = stepper, logits, positions(stepper.cache, 0)
        return self.known[key][1:]

    def _prompt(self, row: Row) -> kvlab.Stepper:
        stepper = kvlab.Stepper(self.case.model, self.case.fresh())
        with stepper.cache.prefill() if self.case.coarse else contextlib.nullcontext():
            for piece in row.pieces if self.case.coarse else (row.prompt,):
                stepper.first = stepper.feed(torch.tensor([piece]))[0]
        return stepper

    def _uncached(self, row: Row):
        family, dtype, changes = self.case.changes
        with torch.no_grad():
            logits = tiny(family, "sdpa", dtype, **changes)(torch.tensor([row.text]), use_cache=False).logits[
                0
            ]
        return logits[-len((row.fed or row.pieces)[-1]) :].float()


def bare(stepper: kvlab.Stepper, model, ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """A pass of somebody who does not say what a prompt is; the stepper learns of it. real: its mask."""
    mask = torch.cat([stepper.mask, torch.ones_like(ids) if real is None else real], 1)
    where = own_positions(mask)[:, -ids.shape[1] :].clamp(min=0)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=where, past_key_values=stepper.cache)
    stepper.ids, stepper.mask = torch.cat([stepper.ids, ids], 1), mask
    stepper.padded = stepper.padded or not bool(mask.all())
    return out.logits


def positions(cache, row: int):
    """Positions held by layer and KV head, without padding; None where layers hold none."""
    if not all(hasattr(layer, "positions") for layer in cache.layers):
        return None
    real = lambda head: sorted(p for p in head if p >= 0)  # captured steps leave them in any order
    return [[real(head) for head in layer.positions[row].tolist()] for layer in cache.layers]
