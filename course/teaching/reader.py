"""Reader: feeds a text to a model through a learner's cache, and asks that cache about clause 17."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.stats import Stats

from . import check, lease
from .parts import part


class Reader:
    """Feeds a text to a model built like Llama, through a `mine.Cache`: as `kvlab.Stepper` does."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    @torch.no_grad()
    def feed(self, ids: Tensor, last: bool = False) -> Tensor:
        """Logits `[1, vocabulary]` of the last token, once `ids` `[1, new]` are read; last: as in Stepper."""
        body, cache, new = self.model.model, self.cache, ids.shape[1]
        x = body.embed_tokens(ids)  # [1, new, h]
        turns = body.rotary_emb(x, torch.arange(cache.seen, cache.seen + new)[None])
        guesses, inputs = new == 1 and cache.fetch and cache.seen, []
        for number, block in enumerate(body.layers):
            inputs.append(x[0, -1])
            if guesses and number + 1 < len(body.layers):
                cache.ahead(number + 1, _turned(self._rehearsed(number + 1, inputs), *turns))
            attention, y = block.self_attn, block.input_layernorm(x)
            q, k, v = (
                project(y)[0].view(new, -1, attention.head_dim).transpose(0, 1)  # [heads, new, d]
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            out = cache.attend(number, _turned(q, *turns), _turned(k, *turns), v)
            if not isinstance(out, Tensor) or out.shape != q.shape:
                shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(f"attend gave {shape}, and {tuple(q.shape)} is expected, [heads, new, d]")
            x = x + attention.o_proj(out.transpose(0, 1).reshape(1, new, -1))
            x = x + block.mlp(block.post_attention_layernorm(x))
        cache.seen += new
        return self.model.lm_head(body.norm(x[:, -1]))

    def _rehearsed(self, layer: int, inputs: list[Tensor]) -> Tensor:
        """The query `[heads, 1, d]` of a layer before RoPE, by `rehearse` and from what is known so far."""
        blocks = self.model.model.layers
        query = blocks[layer].self_attn.q_proj
        gains = [block.input_layernorm.weight for block in blocks]
        guess = part("rehearse")(layer, inputs, gains, [block.self_attn.q_proj.weight for block in blocks])
        guess = guess if query.bias is None else guess + query.bias
        return guess.view(-1, 1, blocks[layer].self_attn.head_dim)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: each pair of channels is turned by the token's position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def write(model, tokenizer, text: str, cache, new: int = 12) -> str:
    """What the model writes after a text, token by token, through the cache; or why it cannot yet."""
    reader, ids, said = Reader(model, cache), tokenizer(text, return_tensors="pt").input_ids, []
    try:
        for _ in range(new):
            ids = reader.feed(ids).argmax(-1, keepdim=True)
            said.append(int(ids))
    except Exception as error:  # a learner's own code: whatever it raises is an answer
        return not_yet(type(cache), error)
    return tokenizer.decode(said)


def clause17(model, tokenizer, made: Callable) -> int | None:
    """Ask a cache about clause 17 of six leases, which differ in the name that this clause gives.

    Prints the first clause, question and answer, how many answers are right, and what the cache holds.
    Returns how many are right. A cache that stops gets one line, and 0; or None while a `...` is left.
    """
    found = answered(model, tokenizer, made)
    return found and found[0]


def answered(model, tokenizer, made: Callable) -> tuple[int, Stats | None] | None:
    """As `clause17`; with the stats of the last lease's cache, or None where it stops. If the first cache
    lets nothing go, the other leases come in three parts, the second of which begins with the name."""
    asked, said, parts = lease.asked_of_workshop(), [], 1
    try:
        for context, question, name in asked:
            ids, cache = tokenizer(context + question, return_tensors="pt").input_ids, made()
            reader = Reader(model, cache)
            before = tokenizer(context.partition(f" {name}")[0], return_tensors="pt").input_ids.shape[1]
            for fed in ids[:, :-1].tensor_split([before, before + 40][: parts - 1], dim=1):
                reader.feed(fed)
            token = reader.feed(ids[:, -1:]).argmax(-1, keepdim=True)
            said.append(tokenizer.decode(token[0]).strip())
            stats = cache.stats()
            parts = 3 if stats.tokens_held == stats.tokens_seen else 1
            reader.feed(token)  # the answer is read, too: a step breaks what the one before has spoilt
    except Exception as error:  # a learner's own code: whatever it raises is an answer
        print(not_yet(made, error))
        return None if "ellipsis" in str(error) or isinstance(error, NotImplementedError) else (0, None)
    right = sum(bool(one) and name.startswith(one) for one, (_, _, name) in zip(said, asked, strict=True))
    print(
        f'Clause 17: "{lease.DOG.format(asked[0][2])}"  You: "{asked[0][1].strip()}"  Your cache: "{said[0]}"'
    )
    print(
        f"{right} of {len(asked)} leases answered; {stats.tokens_held} of {stats.tokens_seen} tokens held,"
        f" {stats.device_bytes / 1e3:,.0f} kB on the device, {stats.host_bytes / 1e3:,.0f} kB on the host,"
        f" {stats.moved_bytes / 1e3:,.0f} kB moved by the last step"
    )
    if not stats.tokens_held:
        print("It holds nothing: a step sees its own tokens alone until `append` sets self.K and self.V.")
    if right == 1 and parts > 1 and not cache.bits:
        print("The other leases come in parts: does each part see those before it, in order?")
    return right, stats


check.ASKS["clause17"] = answered


def not_yet(made, error: Exception) -> str:
    """The line for a cache that is not finished."""
    return f"not yet: {made.__name__} stopped with {type(error).__name__}: {error}"
