"""Chapter 2: the KV cache."""

import torch

from course.teaching.check.exercise import Exercise

# 1. The line that makes it a cache.


def _append(past, new):
    return torch.cat([past, new], dim=2)


def _cache_cases():
    generator = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(shape, generator=generator)
    return [
        (make(1, 2, 5, 4), make(1, 2, 1, 4)),
        (make(2, 3, 3, 8), make(2, 3, 1, 8)),
        (make(1, 1, 4, 2), make(1, 1, 2, 2)),
        (make(1, 1, 1, 3), make(1, 1, 1, 3)),
    ]


append = Exercise(
    "append",
    _append,
    _cache_cases,
    {
        "the new key stands before the old ones; tokens stay in their order": lambda p, n: torch.cat(
            [n, p], dim=2
        ),
        "you joined along the heads (dimension 1); tokens are dimension 2": lambda p, n: torch.cat(
            [p, n], dim=1
        ),
        "you joined along the batch (dimension 0); tokens are dimension 2": lambda p, n: torch.cat(
            [p, n], dim=0
        ),
        "you joined along the channels (dimension 3); tokens are dimension 2": lambda p, n: torch.cat(
            [p, n], dim=3
        ),
        "you returned only the new token; the past is lost": lambda p, n: n,
        "you returned the past without the new token: the cache is stale by one step": lambda p, n: p,
        "you overwrote the last slot; a cache grows by one token at each step": lambda p, n: torch.cat(
            [p[:, :, : p.shape[2] - n.shape[2]], n], dim=2
        ),
        "the oldest token is gone: a cache grows, it does not slide": (
            lambda p, n: torch.cat([p[:, :, n.shape[2] :], n], dim=2)
        ),
        "torch.stack makes a new dimension; torch.cat joins along one that is there": (
            lambda p, n: torch.stack([p, n], dim=2)
        ),
        "the new token is added to the old ones; it stands beside them": lambda p, n: p + n,
        "the new token is in the cache twice": lambda p, n: torch.cat([p, n, n], dim=2),
        "the order of the tokens is turned around": lambda p, n: torch.cat([p, n], dim=2).flip(2),
        "the result has only its last slots filled: the past became zeros": (
            lambda p, n: torch.cat([torch.zeros_like(p), n], dim=2)
        ),
        "heads and tokens are exchanged: give the result as [batch, kv_heads, tokens, head_dim]": (
            lambda p, n: torch.cat([p, n], dim=2).transpose(1, 2)
        ),
    },
    "one token longer, in order",
    signs={
        "it is no longer than before: a cache grows by the new tokens": lambda r, p, n: r.shape == p.shape,
        "it is longer than past and new together": lambda r, p, n: r.shape[2] > p.shape[2] + n.shape[2],
    },
)


# 2. The planted bug: the position of the new token.


def _next_position(held, new):
    return torch.arange(held, held + new)


next_position = Exercise(
    "next_position",
    _next_position,
    lambda: [(0, 6), (6, 1), (7, 1), (10, 3)],
    {
        "the position does not advance: every new token says it stands at 0": lambda held, new: torch.arange(
            new
        ),
        "off by one: with 6 tokens held (0 to 5), the next one stands at 6": (
            lambda held, new: torch.arange(held, held + new) - 1
        ),
        "off by one: with 6 tokens held (0 to 5), the next one stands at 6, not 7": (
            lambda held, new: torch.arange(held, held + new) + 1
        ),
        "those are the positions of all tokens; only the new ones are fed": lambda held, new: torch.arange(
            held + new
        ),
        "one position for all new tokens: each stands one further than the one before": (
            lambda held, new: torch.full((new,), held)
        ),
        "one token too many: range and arange stop before their end": (
            lambda held, new: torch.arange(held, held + new + 1)
        ),
        "the arguments of arange are begin and end, not begin and length": (
            lambda held, new: torch.arange(held, new)
        ),
        "those are the positions of the tokens in the cache; the new ones stand after them": (
            lambda held, new: torch.arange(held)
        ),
        "that is the number of tokens, not the positions of the new ones": lambda held, new: held + new,
        "the order is turned around: the first of the new tokens stands at `held`": (
            lambda held, new: torch.arange(held, held + new).flip(0)
        ),
        "those are the two ends; every new token from the first to the last needs its position": (
            lambda held, new: (held, held + new)
        ),
        "that is one position; every new token needs its own": lambda held, new: held,
        "every position is `new` too far: the first new token stands at `held`": (
            lambda held, new: torch.arange(held + new, held + 2 * new)
        ),
    },
    "a token's position is the number of tokens before it",
    holds="indices",
    given=lambda held, new: torch.arange(new),
)


# 3. Design: does it fit?


def _memory(layers, kv_heads, head_dim, tokens, batch, bits):
    return 2 * layers * kv_heads * head_dim * tokens * batch * bits / 8


memory = Exercise(
    "memory",
    _memory,
    lambda: [(32, 32, 128, 2048, 1, 16), (80, 8, 128, 1000, 3, 8), (2, 1, 4, 5, 7, 4)],
    {
        "you counted the keys and forgot the values: there are two tensors for each layer": (
            lambda l, n, d, t, b, bits: l * n * d * t * b * bits / 8
        ),
        "that is in bits; eight bits are one byte": lambda l, n, d, t, b, bits: 2 * l * n * d * t * b * bits,
        "you forgot the batch: each row has a cache of its own": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * t * bits / 8
        ),
        "you took two bytes for every number, whatever `bits` says": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * t * b * 2
        ),
        "you forgot the layers: each has keys and values of its own": (
            lambda l, n, d, t, b, bits: 2 * n * d * t * b * bits / 8
        ),
        "you multiplied by the bytes of a value and by 8: divide the bits by 8": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * t * b * bits * 8
        ),
        "you forgot the tokens: every one of them has a key and a value": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * b * bits / 8
        ),
        "you forgot the KV heads: each has keys and values of its own": (
            lambda l, n, d, t, b, bits: 2 * l * d * t * b * bits / 8
        ),
        "you forgot the channels: a key holds head_dim numbers": (
            lambda l, n, d, t, b, bits: 2 * l * n * t * b * bits / 8
        ),
        "that is the size of a table of scores (tokens x tokens); a cache grows with the tokens": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * t**2 * b * bits / 8
        ),
        "that is in GB; asked for are bytes": lambda l, n, d, t, b, bits: _memory(l, n, d, t, b, bits) / 1e9,
        "that is in GiB; asked for are bytes": lambda l, n, d, t, b, bits: (
            _memory(l, n, d, t, b, bits) / 2**30
        ),
        "four tensors for each layer? Queries and outputs are not kept": (
            lambda l, n, d, t, b, bits: 2 * _memory(l, n, d, t, b, bits)
        ),
        "three tensors for each layer? Queries are not kept": (
            lambda l, n, d, t, b, bits: 1.5 * _memory(l, n, d, t, b, bits)
        ),
        "bits // 8 is 0 for 4 bits: divide at the end, or with /": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * t * b * (bits // 8)
        ),
        "you forgot the number of bits: that is a count of numbers, not of bytes": (
            lambda l, n, d, t, b, bits: 2 * l * n * d * t * b
        ),
    },
    "this is the memory a cache needs",
)
