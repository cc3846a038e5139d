"""How far does a method move the model's predictions? The most sensitive figure there is.

Held-out stories are decoded with their own text as the answer (teacher forcing): the first PROMPT
tokens go in (all but the last by prefill, as everywhere: tail = 1), then DECODED predictions are
made, each through the cache. Compared with the full cache on the same text:

    top1  share of predictions whose arg max is the full cache's
    kl    mean of KL(full || method) over the predictions, in nats per token

Values are means over stories, standard errors are over stories. A full cache runs along as the
reference, also for `full` itself (exactly 1 and 0).
"""

from __future__ import annotations

import math
import statistics
from itertools import chain, count

import torch
from torch import Tensor

import kvlab
from kvlab.decode import Stepper
from kvlab.devices import entry_of

from .batching import TAIL, TOKENS_LONG, Meter, metric_row, steps_at_once
from .kept import Kept
from .scoring import Scorer

PROMPT = 256  # tokens of a story that are prompt
DECODED = 24  # predictions scored per story
STORIES = 48  # at most
REFERENCE = "full cache as reference"


def prompts(tokenizer, texts: list[str], limit: int | None, longest: int) -> Tensor:
    """Stories long enough -> token ids `[stories, prompt + DECODED - 1]`.

    A model with a context shorter than PROMPT + DECODED gets a shorter prompt. Texts that are too
    short are left out, and so are those beyond `limit` (default: STORIES).
    """
    length = min(PROMPT + DECODED - 1, longest)
    encoded = [tokenizer.encode(text)[:length] for text in texts]
    fitting = [ids for ids in encoded if len(ids) == length]
    if not fitting or length <= DECODED:
        raise ValueError(f"agreement: no story has {length} tokens for this model's tokenizer")
    return torch.tensor(fitting[: limit or STORIES])


@torch.inference_mode()
def predictions(stepper: Stepper, ids: Tensor, meter: Meter) -> Tensor:
    """The DECODED predictions of each row `[rows, DECODED, V]`, after a prefill of ids' first tokens.

    `recompute` holds nothing, so one pass over the known text gives what it would compute; so does a cache
    whose steps do not depend on each other (`steps_at_once`).
    """
    first = ids.shape[1] - DECODED + 1 - TAIL  # tokens prefilled
    if stepper.cache.recompute:
        return stepper.feed(ids[:, first:])[:, -DECODED:]
    if steps_at_once(stepper.cache):
        before, count = stepper.cache.stats(), ids.shape[1] - first
        known = stepper.feed(ids[:, first:])
        meter.add_pass(before, stepper.cache.stats(), count, torch.full((len(ids),), count))
        return known
    found = []
    for column in range(first, ids.shape[1]):
        found.append(stepper.feed(ids[:, column : column + 1], last=True))
        meter.add(stepper.cache, len(ids))
    return torch.stack(found, 1)


def compare(full: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """(top1, kl) of each row; logits `[rows, tokens, V]`, kl in nats."""
    agree = (full.argmax(-1) == other.argmax(-1)).double().mean(1)
    expected, found = full.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean(1)
    return agree, kl.clamp(min=0)


@torch.inference_mode()
def measure(
    model, methods, ids: Tensor, batch_size: int, advance=lambda done, total: None, kept: Kept | None = None
) -> dict:
    """{method: metrics, values per story and bytes}, as a cell holds them; prefills are shared.

    methods: Specs, or their texts. ids `[stories, tokens]` as `prompts` makes them. A method that fails has
    its exception instead. kept: where finished batches are kept.
    """
    specs = {str(method): method for method in methods}
    caches = {REFERENCE: kvlab.make_cache(model, "full")}
    caches |= {name: kvlab.make_cache(model, spec) for name, spec in specs.items()}
    kept = kept or Kept()
    scorer = Scorer(model, caches, batch_size, ids.shape[1])
    scorer.kept, scorer.name = kept, kept.of("agreement", ids.tolist())
    rows_at_once = math.ceil(len(ids) / math.ceil(len(ids) / min(batch_size, TOKENS_LONG // PROMPT)))
    parts, done = ids.to(entry_of(model)).split(rows_at_once), count(1)
    scorer.advance = lambda items: advance(next(done), len(parts))
    batches = [[index] for index in range(len(parts))]
    rows = scorer.answered(len(parts), batches, lambda members: _batch(scorer, parts[members[0]]))
    clock = scorer.clock
    clock.stop()
    of_all = clock.total - clock.prepared - sum(clock.own[name] for name in specs)  # prefill and reference
    more = {"prefill_seconds": of_all, "together": len(specs)}
    return {
        name: scorer.errors.get(name) or _numbers(rows[name], scorer.meters[name], clock.own[name]) | more
        for name in specs
    }


def _batch(scorer: Scorer, part: Tensor) -> dict[str, list[list[list[float]]]]:
    """{method: one pair, top1 and kl of each row}; who fails is left out. Raises what the reference does."""
    prompt, reference = part[:, : part.shape[1] - DECODED + 1 - TAIL], []

    def score(name: str, stepper: Stepper, logits: Tensor) -> list | None:
        found = predictions(stepper, part, scorer.meters[name])
        if name == REFERENCE:
            reference.append(found)
            return None
        return [column.tolist() for column in compare(reference[0], found)]

    rows = scorer.each(scorer.caches, prompt, None, True, score)
    if REFERENCE in scorer.errors:
        raise scorer.errors[REFERENCE]
    return {name: [found] for name, found in rows.items() if name != REFERENCE}


def _numbers(rows: list[list[list[float]]], meter: Meter, seconds: float) -> dict:
    top1, kl = ([*chain(*column)] for column in zip(*rows, strict=True))
    return {
        "metrics": [summary("top1", top1, higher_is_better=True), summary("kl", kl, higher_is_better=False)],
        "values": {"top1": top1, "kl": kl},
        "bytes": meter.means(),
        "scored": meter.scored,
        "seconds": seconds,
    }


def summary(metric: str, values: list[float], higher_is_better: bool) -> dict:
    """Mean over stories with its standard error."""
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return metric_row(metric, statistics.fmean(values), stderr, len(values), higher_is_better)
