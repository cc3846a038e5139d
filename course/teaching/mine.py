"""Your own cache. It decodes a real model, and every chapter replaces one of its parts.

    class MyCache(mine.MyCache):
        def append(self, layer, k, v): ...       # where new keys and values go (chapters 2, 3)
        def attend(self, layer, q, k, v): ...    # what the layer gives back (2, 9)
        def real(self): ...                      # which rows of a window are tokens (3)
        def store(self, layer): ...              # the numbers that keys and values become (4)
        def snapkv(self, layer, q): ...          # which tokens of a prompt stay (5)
        def bring(self, layer): ...              # how a layer comes from the host (6)
        def ahead(self, layer, guess): ...       # what the next layer will want, guessed (7)
        def score(self, keys, positions): ...    # how much a token is worth by its key (8)

`mine.keep(MyCache)` puts these methods into the class MyCache of my_cache.py, beside those of earlier
chapters; `mine.MyCache` is that class. A part that you have not written is the course's. Settings are not
kept: a chapter begins with all of them off and switches on what it needs. `mine.part(snapkv)` gives your
function once its check accepts it, and the course's until then. `mine.keep(snapkv)` also writes it to
my_cache.py, where later chapters find it by name, `mine.part("snapkv")`. A cache of this kind serves one
text at a time, on models built like Llama.

Exercises that build no part of it are not kept: `visible` and `next_position` belong to the loop around a
cache, `add_up` to H2O's sums and `head_counts` to AdaKV, which are caches of their own, `step_seconds` and
`pareto` to comparisons, and the third exercise of each chapter is a decision. `generate`, a loop without a
cache, is kept as what the cache replaces.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvlab.calibrate.skew import skew
from kvlab.parameters import check_fraction_or_count, check_number, check_one_of, check_whole
from kvlab.stats import Stats

from . import check, kept, lease
from .parts import course, part, works
from .reader import Reader, answered, clause17, not_yet, write

__all__ = [  # what a notebook finds here; MyCache is there, too
    "Cache", "Reader", "answered", "clause17", "course", "keep", "not_yet", "part", "shared", "weights",
    "write",
]  # fmt: skip
WINDOW, BLOCK = 16, 32  # the queries that SnapKV asks; the tokens that share a scale in KIVI
PLAIN = 32  # bits of a number as the workshop model computes it


class Cache:
    """One text's keys and values. With all settings off everything is kept, and grows.

    q `[heads, new, d]`; k, v `[kv_heads, new, d]` of the tokens that a pass feeds, keys after RoPE; K, V
    `[kv_heads, held, d]` of what is held. `self.K` and `self.V` hold them by the number of the layer, and
    `self.seen` is how many tokens came before this pass. `self.moved` counts the bytes that the last step
    brought from the host, and `self.aside` those that the device holds to choose by.
    """

    window, bits, page = 0, 0, 0  # Store: rows that are reserved; bits of a number; tokens of a page
    keep, budget, reach = None, 0.4, 1  # Keep: "snapkv" or "norm_score"; tokens that stay, or their part
    host, fetch, turns = False, 0, None  # Place: on the host; the part that a step fetches of a layer
    part, alpha = 0.3, 4.0  # of the columns; how far a score may be below the best
    pages = 0  # that a step reads of the host

    def __init__(self):
        self.K, self.V, self.seen, self.moved, self.aside = {}, {}, 0, 0, 0
        self.sizes, self.wanted, self.turned, self.rounded = {}, {}, {}, {}

    @classmethod
    def begun(cls, model) -> Reader:
        """What feeds a text to a model through a fresh cache, as `kvlab doctor --method` does."""
        check_one_of("bits", cls.bits, (0, *range(2, 9)))
        check_whole("page", cls.page, 0)
        check_whole("pages", cls.pages, 0, "pages")
        check_number("fetch", cls.fetch, lambda part: 0 <= part <= 1, "a part from 0 to 1")
        check_fraction_or_count("budget", cls.budget)
        if cls.keep is not None and not hasattr(cls, str(cls.keep)):
            raise ValueError(f"keep={cls.keep!r}: expected snapkv, norm_score or a method of your class")
        if cls.pages and not cls.page:
            raise ValueError("pages are read where there are pages: page=16,pages=4")
        if not _holds(cls):
            raise ValueError("append holds nothing: set self.K and self.V in it, as in chapter 2")
        cache = cls()
        if cache.fetch and cache.turns is None:
            cache.turns = skew(model)
        return Reader(model, cache)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The layer's output for the new tokens, `[heads, new, d]`."""
        K, V = self.read(layer, q) if layer in self.K else (k[:, :0], v[:, :0])
        out, _, _ = part("attend_step")(q, k, v, K, V)
        self.append(layer, k, v)
        self.leave(layer, q)
        return out

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hold the new keys and values; with a window, the newest rows of it."""
        for held, rows in ((self.K, k), (self.V, v)):
            before = held.get(layer, rows.new_zeros(len(rows), self.window, rows.shape[2]))
            held[layer] = torch.cat([before, rows], dim=1)[:, -self.window :]  # all of them at 0

    def real(self) -> Tensor:
        """Which rows of the window hold a token, `[window]`."""
        return torch.tensor(part("real_slots")(self.seen, self.window))

    def read(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """K and V that a step looks at, before its own token joins them."""
        K, V = self.bring(layer) if self.host or self.fetch else (self.K[layer], self.V[layer])
        return (K[:, self.real()], V[:, self.real()]) if self.window else (K, V)

    def bring(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer of the host."""
        K, V = self.carry(layer)
        self.moved = (self.moved if layer else 0) + K.nbytes + V.nbytes
        return K, V

    def carry(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the link carries of a layer: the tokens that were guessed, or all."""
        K, V = self.K[layer], self.V[layer]
        if layer in self.wanted:
            rows = self.wanted.pop(layer)[..., None].expand(-1, -1, K.shape[2])
            return K.gather(1, rows), V.gather(1, rows)
        return K.clone(), V.clone()

    def ahead(self, layer: int, guess: Tensor) -> None:
        """The block before `layer` begins: guess `[heads, 1, d]` is the query that `layer` will ask, if the
        two blocks' inputs are alike. Called in decode steps of a cache that fetches; 0 and 1 need all."""
        if layer >= 2:
            given = self.given(layer, guess)
            self.wanted[layer] = part("choose")(*given, self.part, self.alpha, self.cap(layer))

    def cap(self, layer: int) -> int:
        """The tokens that a step may fetch of a layer."""
        return max(1, int(self.fetch * self.K[layer].shape[1]))

    def given(self, layer: int, guess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `choose` reads of a layer, all of it turned: the sizes of the prompt's queries by column
        `[heads, 1, d]`, the keys `[heads, held, d]`, and the guess `[heads, d]`."""
        K, turn = self.K[layer], self.turns[layer]
        done = K[:, :0] if self.bits else self.turned.get(layer, K[:, :0])  # rounding changes keys
        self.turned[layer] = torch.cat([done, K[:, done.shape[1] :] @ turn], dim=1)
        return self.sizes[layer], self.turned[layer], (shared(guess, K) @ turn)[:, 0]

    def leave(self, layer: int, q: Tensor) -> None:
        """The pass is over: after a prompt tokens go, and after every pass new ones are rounded."""
        if self.seen == 0:
            if self.keep and self.count(layer) < self.K[layer].shape[1]:
                self.let_go(layer, getattr(self, self.keep)(layer, shared(q, self.K[layer])))
            if self.fetch:
                turned = shared(q, self.K[layer]) @ self.turns[layer]
                self.sizes[layer] = turned.abs().sum(1, keepdim=True)  # [kv_heads, 1, d]
        if self.bits:
            self.store(layer)

    def count(self, layer: int) -> int:
        """How many tokens of a prompt stay."""
        return max(WINDOW + 1, round(self.budget * (1 if self.budget > 1 else self.K[layer].shape[1])))

    def let_go(self, layer: int, stay: Tensor) -> Tensor:
        """Let go of all tokens but these, `[heads, kept]` by their slots. Returns these in order."""
        stay = stay.sort(-1).values
        if not stay.diff().all():
            raise ValueError(f"{self.keep} names a token twice: each head keeps different ones")
        rows = stay[..., None].expand(-1, -1, self.K[layer].shape[2])
        self.K[layer], self.V[layer] = self.K[layer].gather(1, rows), self.V[layer].gather(1, rows)
        return stay

    def snapkv(self, layer: int, q: Tensor) -> Tensor:
        """Those that stay by SnapKV, `[heads, kept]`."""
        return part("snapkv")(q, self.K[layer], WINDOW, self.count(layer))

    def norm_score(self, layer: int, q: Tensor) -> Tensor:
        """Those that stay by their keys, `[heads, kept]`."""
        K = self.K[layer]
        at = torch.arange(K.shape[1]).expand(1, len(K), -1)
        return self.score(K[None], at)[0].topk(self.count(layer)).indices

    def score(self, keys: Tensor, positions: Tensor) -> Tensor:
        """`[batch, kv_heads, slots]` for keys `[batch, kv_heads, slots, d]`; the newest token stays."""
        return part("norm_score")(keys, positions, 0, 1, self.reach)

    def store(self, layer: int) -> None:
        """Round what no earlier pass has rounded: keys when they fill one of KIVI's blocks, values with a
        scale for each token."""
        K, V, largest = self.K[layer], self.V[layer], max(1, 2 ** (self.bits - 1) - 1)
        before = self.rounded.get(layer, 0)  # tokens whose values are rounded, and whose keys in full blocks
        done, new = before // BLOCK * BLOCK, V[:, before:]
        step = new.abs().amax(-1, keepdim=True).clamp_min(1e-7) / largest  # [kv_heads, new, 1]
        keys = [part("kivi_keys")(head, self.bits, BLOCK) for head in K[:, done:]]
        self.K[layer] = torch.cat([K[:, :done], torch.stack(keys)], dim=1)
        self.V[layer] = torch.cat([V[:, :before], part("to_codes")(new, step, largest) * step], dim=1)
        self.rounded[layer] = V.shape[1]

    def stats(self) -> Stats:
        """Tokens and bytes, from the tensors of the cache. Where numbers were rounded, bytes are those of
        packed codes, since torch has no tensor of four bits; pages are whole."""
        if not self.K:
            return Stats(0, 0, 0, self.seen, 0)
        rows, layers = self.K[0].shape[1], len(self.K)
        plain = size = sum(one.nbytes for both in (self.K, self.V) for one in both.values())
        if self.bits and self._rounded():
            size = self._packed(rows, layers)
        share = size / plain
        if self.page:
            places = part("place")([("add", "a")] * rows, self.page)
            size = round(size * len({page for page, _ in places}) * self.page / rows)
        held, moved = min(self.seen, rows), round(self.moved * share)
        if not (self.host or self.fetch or self.pages):
            return Stats(size, 0, moved, self.seen, held)
        if self.fetch:  # some columns of the keys
            d = self.K[0].shape[2]
            self.aside = round(self.part * d) / d * share * plain / 2 * (layers - 2) / layers
        return Stats(round(self.aside), size, moved, self.seen, held)

    def _packed(self, rows: int, layers: int) -> int:
        """Bytes of codes, with scales of 16 bits; keys of a block that is not full are not rounded yet."""
        heads, _, d = self.K[0].shape
        waiting = rows % BLOCK
        keys = (rows - waiting) * (self.bits + 2 * 16 / BLOCK) + waiting * PLAIN
        return round(layers * heads * d * (keys + rows * (self.bits + 16 / d)) / 8)

    def _rounded(self) -> bool:
        """Whether the numbers that share a scale are as few as the bits can tell apart."""
        whole = self.K[0].shape[1] // BLOCK * BLOCK
        blocks = [K[:, :whole].unflatten(1, (-1, BLOCK)).mT for K in self.K.values()]
        return all(_different(x) <= 2**self.bits for x in (*blocks, *self.V.values()))


SETTINGS = [name for name, value in vars(Cache).items() if isinstance(value, int | float | None)]


def as_course(model, tokenizer, made: type[Cache], turned: dict) -> bool:
    """Whether a class gives the logits after a lease that the course's cache gives with the same settings,
    some of them turned."""
    settings = {name: getattr(made, name) for name in SETTINGS} | turned
    context, question, _ = lease.asked_of_workshop()[0]
    ids, found = tokenizer(context + question, return_tensors="pt").input_ids, []
    for kind in (made, Cache):
        reader = type(kind.__name__, (kind,), settings).begun(model)
        reader.feed(ids[:, :-1])
        found.append(reader.feed(ids[:, -1:]))
    return torch.allclose(*found, atol=0.01)


check.ASKS["as_course"] = as_course


def _different(x: Tensor) -> int:
    """The most different numbers that stand in one row of the last dimension."""
    return int((x.sort(-1).values.diff() > 0).sum(-1).amax()) + 1 if x.numel() else 0


def shared(q: Tensor, K: Tensor) -> Tensor:
    """One query for each KV head, `[kv_heads, new, d]`: the mean of those that share it."""
    return q.unflatten(0, (len(K), -1)).mean(1)


def weights(q: Tensor, K: Tensor) -> Tensor:
    """What each query gives to each token held, `[heads, new, held]`; the new tokens are the last of K."""
    K = K.repeat_interleave(len(q) // len(K), 0)
    new, held = q.shape[1], K.shape[1]
    later = torch.ones(new, held, device=q.device).triu(held - new + 1).bool()
    return (q @ K.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)


def __getattr__(name: str):
    """`mine.MyCache`: the class in my_cache.py, or the course's; without an `append` that holds nothing."""
    if name != "MyCache":
        raise AttributeError(name)
    own = kept.saved("MyCache") or Cache
    return own if _holds(own) else type("MyCache", (own,), {"append": Cache.append})


def _holds(kind: type[Cache]) -> bool:
    """Whether a fresh cache holds a token that comes."""
    cache = kind()
    cache.append(0, torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    return bool(cache.K)


def keep(made: Callable) -> Callable:
    """Write a function or a class to my_cache.py, and return it. A function that has a check is written once
    its check accepts it; until then the course's is returned, and one line says so. The methods of MyCache
    join those that the file has, unless clause 17 was asked of it and not answered; where it stopped with an
    error, a class with the methods as they were is returned."""
    name = getattr(made, "__name__", "<lambda>")
    if not (inspect.isfunction(made) or inspect.isclass(made)) or name == "<lambda>":
        print(f"mine.keep takes a function or a class that a cell defines by name, not {made!r}")
        return made
    if name in check.EXERCISES and part(made) is not made:
        print(f"{name}: the course's for now; it becomes yours when its check accepts it")
        return part(made)
    if made in check.REFUSED:
        print(f"{name}: as it was; the new part joins it when its check says that it is right")
        parts = [key for key in vars(made) if inspect.isfunction(getattr(Cache, key, None)) and key[0] != "_"]
        old = {key: getattr(made.__base__, key) for key in parts}
        return type(name, (made,), old) if check.REFUSED[made] else made
    with kept.alone():
        kept.write(name, kept.grown(made) if name == "MyCache" else kept.source(made))
    sys.modules.pop(Path(kept.FILE).stem, None)  # a method of that file is read again
    print(f"{name}: yours, kept in {kept.FILE}")
    if name in check.EXERCISES and not works(name):
        print(f"   but {kept.FILE} alone cannot run it: write inside of it what it takes from other cells")
    return made
