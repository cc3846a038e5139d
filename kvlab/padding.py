"""Padding: which of a pass's tokens are real."""

from __future__ import annotations

from torch import Tensor


class Padding:
    """Which new tokens are real: asked by every layer, worked out once per pass."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        self._mask, self._answer = None, None

    def of(self, mask: Tensor | None, batch: int, tokens: int, seen: int):
        """(real bool `[batch, tokens]` or None when all are, count of real tokens per row)."""
        if mask is None:
            return None, [tokens] * batch
        if mask is self._mask and self._answer[0] == (seen, tokens):
            return self._answer[1]
        if tuple(mask.shape) != (batch, seen + tokens):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}: expected [batch, tokens seen + new] = "
                f"{(batch, seen + tokens)}"
            )
        real = mask[:, seen:].bool()
        counts = real.sum(-1).tolist()
        answer = (None, [tokens] * batch) if min(counts) == tokens else (real, counts)
        self._mask, self._answer = mask, ((seen, tokens), answer)
        return answer
