"""All parts of a cache of one's own, together and each alone: `table` asks clause 17 of all of them."""

from __future__ import annotations

from torch import Tensor

from . import check, lease, mine

PARTS = ("attend_step", "snapkv", "norm_score", "kivi_keys", "to_codes", "place", "rehearse", "choose")
QUESTIONS = {"keep": ("keep",), "store": ("bits", "page"), "place": ("fetch",)}  # and the settings of each
OFF = {"keep": None, "bits": 0, "page": 0, "fetch": 0, "host": False}  # all is kept as it is, on the device


class _Read(mine.Cache):
    """A prompt as it was read, for several caches to go on from. asked: the queries of each layer."""

    def __init__(self):
        super().__init__()
        self.asked = {}

    def leave(self, layer: int, q: Tensor) -> None:
        self.asked[layer] = q


def table(model, tokenizer, whole: type[mine.Cache]) -> None:
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


def _going_on(cache: mine.Cache, read: _Read) -> mine.Cache:
    """A cache that takes over a prompt as it leaves it."""
    cache.K, cache.V = dict(read.K), dict(read.V)
    for layer, q in read.asked.items():
        cache.leave(layer, q)
    cache.seen = read.seen
    return cache


def _told(whole: type[mine.Cache], name: str, value) -> str:
    """What a setting is called in the table."""
    if name == "keep":
        return f"{value}, {whole.budget:.0%} stay"
    return {"bits": f"{value} bits", "page": f"pages of {value}", "fetch": f"{value:.0%} fetched"}[name]


def whose() -> None:
    """Print which parts are the learner's, and which are the course's."""
    yours = [name for name in PARTS if mine.part(name) is not check.EXERCISES[name].right]
    print("yours:       ", ", ".join(yours) or "none yet")
    print("the course's:", ", ".join(name for name in PARTS if name not in yours) or "none")
