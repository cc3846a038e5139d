"""One cache of all your parts: what it keeps, how it stores it, and where, each switched on by a setting.

    class MyCache(joined.Cache):
        keep, budget = "snapkv", 0.4  # Keep: what stays of a prompt; or "norm_score", or None for all of it
        bits = 4  # Store: KIVI's keys, and a scale for each token's values; 0: as they are
        page = 16  # Store: tokens of a page; 0: no pages
        fetch, turns = 0.2, skew(model)  # Place: on the host, a step fetches a guess; 0: on the device

A part is yours where my_cache.py has it, and the course's where it has not (`mine.part`). The prompt is read
whole. Then tokens go, what stays is rounded, and it is laid into pages. It serves models that have as many KV
heads as heads, as the workshop model does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.stats import Stats

from . import check, lease, mine

PARTS = ("attend_step", "snapkv", "norm_score", "kivi_keys", "to_codes", "place", "rehearse", "choose")
QUESTIONS = {"keep": ("keep",), "store": ("bits", "page"), "place": ("fetch",)}  # and the settings of each
OFF = {"keep": None, "bits": 0, "page": 0, "fetch": 0}  # a cache that keeps all, as it is, on the device
WINDOW, BLOCK = 16, 32  # the queries that SnapKV asks; the tokens that share a scale in KIVI
PLAIN = 32  # bits of a number as the workshop model computes it


class Cache(mine.Cache):
    """See above. K, V `[heads, held, d]` of a layer are what is held, rounded where `bits` says so."""

    keep, budget, reach = None, 0.4, 1
    bits, page, fetch, turns = 0, 0, 0, None
    part, alpha = 0.3, 4.0  # InfiniGen's part of the columns, and how far a score may be below the best

    def __init__(self):
        super().__init__()
        self.sizes, self.wanted, self.turned = {}, {}, {}

    def leave(self, layer: int, q: Tensor) -> None:
        """Keep, then store: after a prompt tokens go, and after every pass new ones are rounded."""
        if self.seen == 0:
            if self.keep:
                self._evict(layer, self._staying(layer, q))
            if self.fetch:
                self.sizes[layer] = (q @ self.turns[layer]).abs().sum(1, keepdim=True)  # [heads, 1, d]
        if self.bits:
            largest = 2 ** (self.bits - 1) - 1
            keys, codes, V = mine.part("kivi_keys"), mine.part("to_codes"), self.V[layer]
            step = V.abs().amax(-1, keepdim=True).clamp_min(1e-7) / largest  # a scale for each token
            self.K[layer] = torch.stack([keys(head, self.bits, BLOCK) for head in self.K[layer]])
            self.V[layer] = codes(V, step, largest) * step

    def _staying(self, layer: int, q: Tensor) -> Tensor:
        """The tokens of a prompt that stay, `[heads, kept]`."""
        K, count = self.K[layer], max(WINDOW + 1, round(self.budget * q.shape[1]))
        if count >= K.shape[1]:
            return torch.arange(K.shape[1]).expand(len(K), -1)
        if self.keep == "snapkv":
            return mine.part("snapkv")(q, K, WINDOW, count)
        if self.keep == "norm_score":
            at = torch.arange(K.shape[1]).expand(1, len(K), -1)
            return mine.part("norm_score")(K[None], at, 0, 1, self.reach)[0].topk(count).indices
        raise ValueError(f'keep is {self.keep!r}: write "snapkv", "norm_score" or None')

    def _evict(self, layer: int, stay: Tensor) -> None:
        rows = stay.sort(-1).values[..., None].expand(-1, -1, self.K[layer].shape[2])
        self.K[layer], self.V[layer] = self.K[layer].gather(1, rows), self.V[layer].gather(1, rows)

    def ahead(self, layer: int, guess: Tensor) -> None:
        """Place: the layer before chooses what this one will fetch; layers 0 and 1 fetch all."""
        if self.fetch and layer >= 2:
            given = self.given(layer, guess)
            self.wanted[layer] = mine.part("choose")(*given, self.part, self.alpha, self.cap(layer))

    def cap(self, layer: int) -> int:
        """The tokens that a step may fetch of a layer."""
        return max(1, int(self.fetch * self.K[layer].shape[1]))

    def given(self, layer: int, guess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `choose` reads of a layer, all of it turned: the sizes of the prompt's queries by column
        `[heads, 1, d]`, the keys `[heads, held, d]`, and the guess `[heads, d]`."""
        K, turn = self.K[layer], self.turns[layer]
        done = K[:, :0] if self.bits else self.turned.get(layer, K[:, :0])  # rounding changes keys
        self.turned[layer] = torch.cat([done, K[:, done.shape[1] :] @ turn], dim=1)
        return self.sizes[layer], self.turned[layer], (guess @ turn)[:, 0]

    def read(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        K, V = self.K[layer], self.V[layer]
        waiting = K.shape[1] % BLOCK  # keys whose block is not full
        if layer in self.wanted:
            tokens = self.wanted.pop(layer)  # [heads, n]
            waiting = (tokens >= K.shape[1] - waiting).sum().item() / len(tokens)
            rows = tokens[..., None].expand(-1, -1, K.shape[2])
            K, V = K.gather(1, rows), V.gather(1, rows)
        if self.fetch:
            self.moved = (self.moved if layer else 0) + self._bytes(K.shape[1], waiting, 1)
        return K, V

    def stats(self) -> Stats:
        """Bytes of what is held when it is packed: torch has no tensor of four bits. Pages are whole."""
        held, layers = self.K[0].shape[1], len(self.K)
        rows = held
        if self.page:
            rows = self.page * len({page for page, _ in mine.part("place")([("add", "a")] * held, self.page)})
        size = self._bytes(rows, held % BLOCK, layers)
        if not self.fetch:
            return Stats(size, 0, 0, self.seen, held)
        d = self.K[0].shape[2]
        columns = round(self.part * d) / d * self._bytes(held, held % BLOCK, layers - 2) / 2  # of the keys
        return Stats(round(columns), size, self.moved, self.seen, held)

    def _bytes(self, tokens: int, waiting: float, layers: int) -> int:
        """Bytes of K and V of some tokens in some layers, scales at 16 bits. waiting: how many of them have
        keys that are not rounded yet, since KIVI rounds whole blocks."""
        heads, _, d = self.K[0].shape
        if not self.bits:
            return 2 * layers * heads * d * tokens * PLAIN // 8
        keys = (tokens - waiting) * (self.bits + 2 * 16 / BLOCK) + waiting * PLAIN
        return round(layers * heads * d * (keys + tokens * (self.bits + 16 / d)) / 8)


class _Read(mine.Cache):
    """A prompt as it was read, for several caches to go on from. asked: the queries of each layer."""

    def __init__(self):
        super().__init__()
        self.asked = {}

    def leave(self, layer: int, q: Tensor) -> None:
        self.asked[layer] = q


def table(model, tokenizer, whole: type[Cache]) -> None:
    """Ask clause 17 of a cache, of its keep, its store and its place alone, and of none of them: one line for
    each, with the right answers of six. A cache that is not finished gets one line in all."""
    rows = {"none of them": OFF}
    for question, names in QUESTIONS.items():
        settings = {name: getattr(whole, name) for name in names if getattr(whole, name)}
        if settings:
            rows[question + ": " + ", ".join(_told(whole, *one) for one in settings.items())] = OFF | settings
    made = [type("MyCache", (whole,), settings) for settings in (*rows.values(), {})]
    asked, right = lease.asked_of_workshop(), [0] * len(made)
    for context, question, name in asked:
        ids, read = tokenizer(context + question, return_tensors="pt").input_ids, _Read()
        mine.Reader(model, read).feed(ids[:, :-1])  # once for all
        try:
            caches = [_going_on(one(), read) for one in made]
            for row, cache in enumerate(caches):
                said = tokenizer.decode(mine.Reader(model, cache).feed(ids[:, -1:]).argmax(-1)).strip()
                right[row] += bool(said) and name.startswith(said)
            stats = [cache.stats() for cache in caches]
        except Exception as error:  # a learner's own settings: whatever they raise is an answer
            print(mine.not_yet(whole, error))
            return
    wide = max(map(len, rows)) + 2
    print(f"{'':{wide}}{'right':>9}{'held':>7}{'device kB':>11}{'host kB':>9}{'moved kB':>10}")
    for told, count, one in zip((*rows, "all together"), right, stats, strict=True):
        print(f"{told:{wide}}{count:4} of {len(asked)}{one.tokens_held:7}{one.device_bytes / 1e3:11,.0f}"
              f"{one.host_bytes / 1e3:9,.0f}{one.moved_bytes / 1e3:10,.0f}")  # fmt: skip


def _going_on(cache: Cache, read: _Read) -> Cache:
    """A cache that takes over a prompt as it leaves it."""
    cache.K, cache.V = dict(read.K), dict(read.V)
    for layer, q in read.asked.items():
        cache.leave(layer, q)
    cache.seen = read.seen
    return cache


def _told(whole: type[Cache], name: str, value) -> str:
    """What a setting is called in the table."""
    if name == "keep":
        return f"{value}, {whole.budget:.0%} stay"
    return {"bits": f"{value} bits", "page": f"pages of {value}", "fetch": f"{value:.0%} fetched"}[name]


def whose() -> None:
    """Print which parts are the learner's, and which are the course's."""
    yours = [name for name in PARTS if mine.part(name) is not check.EXERCISES[name].right]
    print("yours:       ", ", ".join(yours) or "none yet")
    print("the course's:", ", ".join(name for name in PARTS if name not in yours) or "none")
