"""Perplexity against position: a text in chunks, each prefilled in part and then read on through the cache.

What does a method lose the longer it decodes (Lee et al. 2024 ask it of InfiniGen)? A text is cut into
chunks of one length; the first tokens of a chunk are its prompt, prefilled and compressed, and every token
behind them is predicted through the cache and then fed to it, the text's own token whatever was predicted.
Losses are averaged over chunks, place by place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import kvlab
from kvlab.parameters import text_of

from ..accuracy.batching import Meter
from ..accuracy.prefill import shared
from ..accuracy.taskset import stories

WIDTH = 32  # tokens of a place: losses within it are one number


def chunks(tokenizer, text: Path | None, length: int, limit: int | None) -> Tensor:
    """The text's first chunks, token ids `[chunks, length]`; without one, kvlab's own stories in a row.
    Raises ValueError for a text that is shorter than one chunk."""
    whole = "\n\n".join(stories()) if text is None else text_of(text)
    ids = torch.tensor(tokenizer(whole, add_special_tokens=False, verbose=False).input_ids)
    count = len(ids) // length
    if not count:
        raise ValueError(f"chunk={length}: the text has {len(ids)} tokens only")
    return ids[: count * length].view(count, length)[:limit]


@torch.inference_mode()
def measure(
    model, methods: list, ids: Tensor, prompt: int, batch: int, advance=lambda part: None
) -> Iterator[tuple[str, dict | Exception]]:
    """(method, what was found or the exception that it raised), each as soon as it has read all chunks:
    losses `[chunks, tokens]` in nats of the tokens behind the prompt, bytes, and seconds of reading.
    ids `[chunks, tokens]`; prompt: tokens prefilled; batch: chunks at a time, which share a prefill."""
    caches = {str(method): kvlab.make_cache(model, method) for method in methods}
    meters, seconds = {name: Meter() for name in caches}, dict.fromkeys(caches, 0.0)
    losses: dict[str, list] = {name: [] for name in caches}
    parts = ids.split(batch)
    for index, part in enumerate(parts):
        part = part.to(next(model.parameters()).device)
        left = dict(caches)
        for done, (name, stepper, logits) in enumerate(
            shared(model, left, part[:, :prompt], None, last=True)
        ):
            began = time.perf_counter()
            try:
                if isinstance(logits, Exception):
                    raise logits
                losses[name].append(_read_on(stepper, logits, part, prompt, meters[name]))
            except Exception as error:
                del caches[name]
                yield name, error
                continue
            seconds[name] += time.perf_counter() - began
            advance((index + (done + 1) / len(left)) / len(parts))
            if index + 1 == len(parts):
                found = {"losses": torch.cat(losses[name]), "bytes": meters[name].means()}
                yield name, found | {"scored": meters[name].scored, "seconds": seconds[name]}


def _read_on(stepper, logits: Tensor, ids: Tensor, prompt: int, meter: Meter) -> Tensor:
    """Losses `[chunks, tokens]` of the tokens behind the prompt; logits are those of its end."""
    found = []
    for column in range(prompt, ids.shape[1]):
        token = ids[:, column : column + 1]
        found.append(-logits.log_softmax(-1).gather(1, token)[:, 0].double().cpu())
        if column + 1 < ids.shape[1]:
            logits = stepper.feed(token, last=True)
            meter.add(stepper.cache, len(ids))
    return torch.stack(found, 1)


def numbers(losses: Tensor, prompt: int) -> dict:
    """What a cell holds of losses `[chunks, tokens]`: perplexity over all, `values` (each chunk's mean loss),
    and a row for every WIDTH tokens: where they begin, the mean loss, its standard error over chunks."""
    rows = []
    for start in range(0, losses.shape[1], WIDTH):
        mine = losses[:, start : start + WIDTH].mean(1)
        error = float(mine.std() / math.sqrt(len(mine))) if len(mine) > 1 else None
        width = min(WIDTH, losses.shape[1] - start)
        rows.append(
            {"position": prompt + start, "tokens": width, "loss": float(mine.mean()), "stderr": error}
        )
    return {"perplexity": math.exp(float(losses.mean())), "values": losses.mean(1).tolist(), "rows": rows}
