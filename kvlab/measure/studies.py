"""Studies: InfiniGen's assumptions, on any model (Lee et al. 2024, OSDI; Gong, Yi and Zhang 2024).

The inputs of successive blocks are alike; so the query asked with the block input before is close to the
true one; so the tokens it finds are mostly the right ones, and after skewing some columns are enough. How
many differs from model to model (`brings_best`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..attention import group_importance, recording
from ..devices import entry_of
from ..models import ModelShape, attention_of, blocks_of, prepare, query_of
from ..parameters import resolve_budget
from ..place.topk import most_important


@dataclass(frozen=True)
class Passage:
    """The inputs and queries of every layer while a model read one text, without padding.

    inputs: the block's input `[tokens, hidden]`. attended, fed: what attention and what the feed-forward
    network added to it, like inputs (`fed` of the last layer is missing). queries, guesses: the layer's
    query, and the one it would have asked with the input of the block before, `[heads, tokens, head_dim]`,
    after RoPE (None where no earlier layer has its rotary embedding, so in layer 0).
    keys: `[kv_heads, tokens, head_dim]`.
    """

    inputs: list[Tensor]
    attended: list[Tensor]
    fed: list[Tensor]
    queries: list[Tensor]
    guesses: list[Tensor | None]
    keys: list[Tensor]
    scaling: float

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[0]


def read(model, ids: Tensor) -> Passage:
    """Let the model read `ids` `[1, tokens]` and record the `Passage`.

    Raises ValueError for more than one row, or for a model whose layers do not all attend.
    """
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids has shape {tuple(ids.shape)}: expected [1, tokens]")
    shape = ModelShape.of(prepare(model))
    inputs, attended, rotary = [], [], []

    def before(block, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])
        rotary.append(kwargs.get("position_embeddings"))

    def behind(attention, args, out):
        attended.append(out[0])

    with ExitStack() as hooks, torch.no_grad(), recording() as layers:
        for block in blocks_of(model):
            hooks.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(attention_of(block).register_forward_hook(behind))
        model(ids.to(entry_of(model)), use_cache=False)
        guessed = [
            query_of(model, i, inputs[i - 1], rotary[i])[0]
            if any(x is rotary[i] for x in rotary[:i])
            else None
            for i in range(1, shape.layers)
        ]
    inputs, attended = ([x.reshape(-1, shape.hidden) for x in xs] for xs in (inputs, attended))
    fed = [after - at - added for at, after, added in zip(inputs, inputs[1:], attended)]
    asked, keys = [layer.query[0] for layer in layers], [layer.keys[0] for layer in layers]
    return Passage(inputs, attended, fed, asked, [None, *guessed], keys, layers[0].scaling)


def similarity(passage: Passage) -> dict[str, Tensor]:
    """Cosine between a block's input and the previous block's input and outputs, mean over tokens.

    Returns {"block input", "attention output", "ffn output"}: `[layers - 1]` each, for layers 1, 2, ...
    """
    before = {"block input": passage.inputs, "attention output": passage.attended, "ffn output": passage.fed}
    return {
        name: torch.stack([
            cosine_similarity(now.float(), then.float(), dim=-1).mean()
            for now, then in zip(passage.inputs[1:], others)
        ])
        for name, others in before.items()
    }  # fmt: skip


def skewed(x: Tensor, matrix: Tensor) -> Tensor:
    """x A: `[heads or kv_heads, tokens, head_dim]` by the skewing matrices `[kv_heads, head_dim, head_dim]`
    of `skew.skew`."""
    return x.float() @ matrix.to(x.device).repeat_interleave(x.shape[0] // matrix.shape[0], dim=0)


def scores(query: Tensor, keys: Tensor, scaling: float, columns: Tensor | None = None) -> Tensor:
    """Scaled dot products, over the chosen columns only (`[kv_heads, r]`; None: all of them).

    query `[heads, queries, head_dim]`, keys `[kv_heads, tokens, head_dim]` -> `[heads, queries, tokens]`.
    """
    group = query.shape[0] // keys.shape[0]
    if columns is not None:
        query = query.gather(2, columns.repeat_interleave(group, 0)[:, None].expand(-1, query.shape[1], -1))
        keys = keys.gather(2, columns[:, None].expand(-1, keys.shape[1], -1))
    return query.float() @ keys.float().repeat_interleave(group, 0).transpose(1, 2) * scaling


def strongest_columns(query: Tensor, keys: Tensor, ratio: float) -> Tensor:
    """The columns with the largest sum over tokens of |Q| + |K|, `[kv_heads, round(ratio * head_dim)]`."""
    queried = query.float().abs().unflatten(0, (keys.shape[0], -1)).mean(1).sum(1)
    count = max(1, round(ratio * keys.shape[-1]))
    return (queried + keys.float().abs().sum(1)).topk(count, dim=-1).indices


def brings_best(passage: Passage, layer: int, fetch, matrix: Tensor, last: int = 32) -> float:
    """How often `fetch`, an `InfiniGen` policy, brings the token that a KV head attends to most, the text's
    first one apart, over the last queries of a passage.

    The first token takes the weight that belongs nowhere, and every guess finds it. matrix: the layer's
    skewing matrices. Raises ValueError for a layer without a guess, as layer 0.
    """
    if passage.guesses[layer] is None:
        raise ValueError(f"layer={layer}: no block before it can guess its query")
    seen = (passage.queries[layer], passage.guesses[layer], passage.keys[layer])
    query, asked, keys = (skewed(x, matrix) for x in seen)
    columns = strongest_columns(query[:, :-last], keys[:, :-last], fetch.ratio)
    position = torch.arange(passage.tokens, device=keys.device)
    later = position >= position[-last:, None]  # [last, tokens]
    true, guessed = (
        scores(x[:, -last:], keys, passage.scaling, some).masked_fill(later, -torch.inf).transpose(0, 1)
        for x, some in ((query, None), (asked, columns))
    )  # [last, heads, tokens]
    past = position[-last:].tolist()
    caps = [min(n, resolve_budget(fetch.budget, n + 1) or n) for n in past]
    best = group_importance(true, len(keys))[..., 1:].argmax(-1, keepdim=True) + 1
    brought = most_important(group_importance(guessed, len(keys)), fetch.how_many(guessed, caps))
    return (brought == best).any(-1).float().mean().item()
