"""Attention: a layer's inputs in a pass, the arithmetic on them, and recorded passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .devices import entry_of
from .visibility import Visibility

QUERY_BLOCK = 256  # queries attended at a time, so that no T x T matrix of weights is ever held
LONG = 1024  # tokens from which the weights of such a block leave a CPU's cache
WATCHED_BLOCK = 64  # queries whose weights stay there, for each thread
THREADS = 4  # at most: a block's weights need memory


@contextmanager
def while_set(variable: ContextVar, value) -> Iterator:
    """Set the variable to this value inside the block, and yield it."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def attending() -> Iterator[None]:
    """Inside this block, every pass of a prepared model attends through kvlab, whatever cache it carries."""
    with while_set(always, True):
        yield


always: ContextVar[bool] = ContextVar("kvlab_always", default=False)


@dataclass
class Recorded:
    """The inputs of one layer's attention in a pass.

    query `[batch, heads, tokens, head_dim]`, keys (after RoPE) and values `[batch, kv_heads, tokens,
    head_dim]`; softcap, sinks: see `interface.kvlab_attention`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    visibility: Visibility
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def part(self, start: int, end: int, seen: int) -> Recorded:
        """Tokens start..end of the pass, after the `seen` tokens before them."""
        cut = {name: getattr(self, name)[:, :, start:end] for name in ("query", "keys", "values")}
        return replace(self, visibility=self.visibility.first(seen + end - start), **cut)

    def attend(self, observes: bool = False, last: int | None = None) -> tuple[Tensor, Tensor | None]:
        """(The layer's output `[batch, heads, tokens, head_dim]`, `received` if a keep observes)."""
        return prefill(self, True, observes, last)

    def attend_to(self, keys: Tensor, values: Tensor | None, allowed=None, counted=None):
        """As `attend`, of these queries to held keys and values."""
        numbers = self.query, keys, values, self.scaling, allowed, counted
        return attend(*numbers, softcap=self.softcap, sinks=self.sinks)

    def received(self, last: int | None = None) -> Tensor:
        """Attention that every token received from the `last` queries (None: all), `[batch, kv_heads,
        tokens]`."""
        return prefill(self, False, True, last)[1]


records: ContextVar[list[Recorded] | None] = ContextVar("kvlab_records", default=None)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Inside this block, passes of kvlab's models without a cache are recorded: yields a list with one entry
    per layer and pass, in the order in which the layers attend."""
    with attending(), while_set(records, []) as found:
        yield found


@contextmanager
def as_it_was(model) -> Iterator[None]:
    """Restore the model's buffers and its modules' numbers after the block, such as those of rotary
    embeddings that follow the length of a text."""
    before = []
    for module in model.modules():
        if buffers := {name: x for name, x in module.named_buffers(recurse=False) if x.is_floating_point()}:
            numbers = {name: x for name, x in vars(module).items() if isinstance(x, int | float | Tensor)}
            before.append((module, numbers | buffers, {name: x.clone() for name, x in buffers.items()}))
    try:
        yield
    finally:
        for module, values, copies in before:
            for name, value in values.items():
                setattr(module, name, value)
                if name in copies and not (value.is_meta or value.equal(copies[name])):
                    value.copy_(copies[name])


@torch.no_grad()
def recorded(model, ids: Tensor) -> list[Recorded]:
    """The inputs of every layer's attention while the model reads `ids` `[batch, tokens]`, without a cache.

    model: one that is prepared (`models.prepare`).
    """
    with recording() as layers, as_it_was(model):
        model(ids.to(entry_of(model)), use_cache=False)
    return layers


def attend(query, keys, values, scaling, allowed=None, counted=None, *, softcap=None, sinks=None):
    """Softmax attention of a few queries over held keys and values.

    query `[batch, heads, q, head_dim]`, keys and values `[batch, kv_heads, slots, head_dim]`, allowed bool
    `[batch, 1 or kv_heads, q, slots]` (or numbers to add to the scores) or None. counted: None, or bool
    `[batch, q]`: the queries whose weights are summed; values may then be None, and out is None too. softcap,
    sinks: see `interface.py`. Returns (out `[batch, heads, q, head_dim]`, received `[batch, kv_heads, slots]`
    or None): received is the weight of every slot, averaged over the query heads of the group.
    """
    batch, heads, count, _ = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    fused = counted is None and softcap is None and sinks is None
    if fused and count > 1 and group > 1:
        if allowed is not None and allowed.shape[1] > 1:
            allowed = allowed.repeat_interleave(group, dim=1)
        how = {"attn_mask": allowed, "scale": scaling, "enable_gqa": True}
        return over_held(query, keys, values, **how), None
    # The query heads of a group are just more queries of one KV head.
    grouped = query.reshape(batch, kv_heads, group * count, -1)
    if allowed is not None and group > 1:  # [batch, h, q, slots] -> [batch, h, group * q, slots]
        allowed = allowed[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    if fused:
        out = over_held(grouped, keys, values, attn_mask=allowed, scale=scaling)
        return out.reshape(batch, heads, count, -1), None
    weights = scores_of(grouped, keys, scaling, softcap)
    if allowed is not None:
        hidden = allowed.dtype == torch.bool
        weights = weights.masked_fill(~allowed, -torch.inf) if hidden else weights + allowed
    if sinks is not None:
        beside = sinks.float().view(1, kv_heads, group, 1).expand(batch, -1, -1, count).flatten(2)
        weights = torch.cat([weights, beside[..., None]], -1)
    weights = weights.softmax(-1)[..., : keys.shape[2]]
    out = None if values is None else (weights.to(values.dtype) @ values).reshape(batch, heads, count, -1)
    if counted is None:
        return out, None
    weights = weights.reshape(batch, kv_heads, group, count, -1) * counted[:, None, None, :, None]
    return out, (weights.sum((2, 3)) / group).float()


def over_held(query: Tensor, keys: Tensor, values: Tensor, **how) -> Tensor:
    """torch's attention over the tokens held, but on a GPU never by cuDNN, torch's choice there: it plans
    again for every length (40 ms on an H200) and takes ten times as long as flash attention at 64k tokens."""
    cudnn = query.is_cuda and torch.backends.cuda.cudnn_sdp_enabled()
    if cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return scaled_dot_product_attention(query, keys, values, **how)
    finally:
        if cudnn:
            torch.backends.cuda.enable_cudnn_sdp(True)


def most_received(given: Recorded, keys: Tensor, allowed: Tensor) -> Tensor:
    """The largest weight that every slot received from any query of its group, `[batch, kv_heads, slots]`.

    given: the queries; keys `[batch, kv_heads, slots, head_dim]`; allowed bool `[batch, 1 or kv_heads, q,
    slots]`; a query that sees nothing gives no weight. `QUERY_BLOCK` queries at a time.
    """
    batch, heads, count, _ = given.query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    most = keys.new_full((batch, kv_heads, keys.shape[2]), -torch.inf, dtype=torch.float32)
    for start in range(0, count, QUERY_BLOCK):
        end = start + QUERY_BLOCK
        query, hidden = given.query[:, :, start:end], ~allowed[:, :, start:end]
        grouped = query.reshape(batch, kv_heads, -1, query.shape[3])
        scores = scores_of(grouped, keys, given.scaling, given.softcap)
        scores = scores.unflatten(2, (group, -1)).masked_fill_(hidden[:, :, None], -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)  # a weight is exp(score - total)
        if given.sinks is not None:
            total = torch.logaddexp(total, given.sinks.float().view(1, kv_heads, group, 1, 1))
        total.masked_fill_(total == -torch.inf, 0.0)
        most = torch.maximum(most, scores.sub_(total).amax((2, 3)))
    return most.exp().float()


def scores_of(query: Tensor, keys: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Scaled dot products of queries `[..., q, r]` with keys `[..., slots, r]`, `[..., q, slots]`.
    In fp32 or wider, as torch's attention computes them: a product of large K overflows fp16."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return capped((query.to(wide) @ keys.to(wide).transpose(-1, -2)).mul_(scaling), softcap)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scaled scores between -softcap and softcap."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def prefill(given: Recorded, wanted: bool, observes: bool, last: int | None):
    """Causal attention of a whole prompt over itself, `QUERY_BLOCK` queries at a time where needed.

    wanted: whether to return the output; observes: whether to return the attention received, summed over the
    real queries or the `last` of them. Returns (out like the query or None, received `[batch, kv_heads,
    tokens]` or None).
    """
    query, keys, values, visibility = given.query, given.keys, given.values, given.visibility
    (batch, heads, tokens, _), local = query.shape, visibility.local
    real, _ = visibility.real(batch, tokens, 0)
    everything = real is None and (visibility.rule is None or tokens <= (local or 0))
    if everything and given.softcap is None and given.sinks is None:
        gqa = heads != keys.shape[1]
        how = {"is_causal": tokens > 1, "scale": given.scaling, "enable_gqa": gqa}
        if not observes:
            return scaled_dot_product_attention(query, keys, values, **how), None
        if tokens > LONG and all(map(_plain, (query, keys, values))):
            if last is None:
                return _watched(given, 0, wanted)
            out = scaled_dot_product_attention(query, keys, values, **how) if wanted else None
            return out, _watched(given, max(0, tokens - last), False)[1]
    positions = visibility.positions(query)[:, None]
    out = query.new_empty(*query.shape[:-1], values.shape[-1]) if wanted else None
    received = query.new_zeros(batch, keys.shape[1], tokens, dtype=torch.float32) if observes else None
    for start in range(0, tokens, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, tokens)
        # the first query of the block sees nothing before its window, and no padding
        first = max(0, start + 1 - local) if real is None and local is not None else 0
        asked = positions[:, 0, start:end]
        counted = observed(asked, positions.amax(-1), last) if observes else None
        if last is not None and observes and not bool(counted.any()):
            counted = None
        if counted is None and not wanted:
            continue
        held = keys[:, :, first:end], values[:, :, first:end] if wanted else None
        allowed = visibility.allowed(asked, positions[..., first:end])
        part = replace(given, query=query[:, :, start:end])
        block, weights = part.attend_to(*held, allowed, counted)
        if wanted:
            out[:, :, start:end] = block
        if counted is not None:
            received[..., first:end] += weights
    return out, received


def _plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and not x.requires_grad


def _watched(given: Recorded, first: int, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """As `prefill`, for the queries from `first` on, over a prompt without padding or window, head by head:
    the weights of `WATCHED_BLOCK` queries per thread stay in the processor's cache while they are used."""
    query, keys, values = given.query, given.keys, given.values
    (batch, heads, tokens, width), kv_heads = query.shape, keys.shape[1]
    group, block = heads // kv_heads, WATCHED_BLOCK * min(THREADS, torch.get_num_threads())
    out = query.new_empty(batch, heads, tokens, values.shape[3]) if wanted else None
    received = query.new_zeros(batch, kv_heads, tokens)
    room = query.new_empty(group * block * tokens)
    later = torch.ones(block, block, dtype=torch.bool, device="cpu").triu(1)
    for row in range(batch):
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            asking, keys_of, values_of = query[row, mine] * given.scaling, keys[row, head], values[row, head]
            summed, made = received[row, head], out[row, mine] if wanted else None
            for start in range(first, tokens, block):
                end = min(start + block, tokens)
                count = end - start
                asked = asking[:, start:end].reshape(group * count, width)
                weights = room[: group * count * end].view(group * count, end)
                torch.mm(asked, keys_of[:end].t(), out=weights)
                weights.view(group, count, end)[..., start:].masked_fill_(later[:count, :count], -torch.inf)
                torch.softmax(weights, -1, out=weights)
                summed[:end] += weights.sum(0)
                if wanted:
                    made[:, start:end] = (weights @ values_of[:end]).view(group, count, -1)
    return out, received.div_(group)


def observed(asked: Tensor, newest: Tensor, last: int | None) -> Tensor:
    """Which queries a keep observes, bool `[batch, q]`: the real ones among each row's `last` (None: all).
    asked `[batch, q]`: their positions, -1 for padding; newest `[batch, 1]`: the position of the row's last
    token."""
    real = asked >= 0
    return real if last is None else real & (asked > newest - last)


def true_scores(
    query: Tensor, keys: Tensor, scaling: float, positions: Tensor | None, softcap: float | None = None
) -> Tensor:
    """Scaled dot products of one query with every key, -inf for empty slots.

    query `[batch, heads, 1, r]`, keys `[batch, kv_heads, slots, r]`, positions `[batch, 1 or kv_heads,
    slots]` or None when no slot is empty -> `[batch, heads, slots]`, fp32.
    """
    batch, heads = query.shape[:2]
    kv_heads = keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, -1)
    scores = scores_of(grouped, keys, scaling, softcap)
    if positions is not None:
        scores = scores.masked_fill((positions < 0)[:, :, None], -torch.inf)
    return scores.flatten(1, 2)


def group_importance(scores: Tensor, kv_heads: int, sinks: Tensor | None = None) -> Tensor:
    """Reduce the scores of the query heads to their KV head, for ranking tokens.

    scores `[batch, heads, slots]` (-inf: not there) -> `[batch, kv_heads, slots]`. With one query head per
    KV head the score itself ranks; in a group it is the mean of the heads' softmax weights (sinks: see
    `interface.kvlab_attention`), and -inf where nothing is: a weight may be 0 where something is.
    """
    if scores.shape[1] == kv_heads:
        return scores
    weights, nothing = softmax_beside(sinks, scores), scores == -torch.inf
    weights, nothing = (x.unflatten(1, (kv_heads, -1)) for x in (weights, nothing))
    return weights.mean(2).masked_fill(nothing.all(2), -torch.inf)


def softmax_beside(sinks: Tensor | None, scores: Tensor) -> Tensor:
    """Softmax of scores `[batch, heads, slots]`, of which sinks `[heads]` (None: none) take a share."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores).view(1, -1, 1).expand(len(scores), -1, -1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
