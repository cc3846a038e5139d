"""What can go wrong with a link: a clear error, and a reset cache that starts over; never a wrong token."""

import contextlib
import copy
import random
import time
from dataclasses import replace

import pytest
import torch
from tiny import begun, prompt, tiny

import kvlab
from kvlab.link.base import checksum
from kvlab.place import Host, LinkError, ModelledLink, TopK, Whole
from kvlab.spec import parse
from kvlab.store import Growing, Int


class Faulty(ModelledLink):
    """A link whose n-th transfer, either way or toward one side, has a fault."""

    def __init__(self, at, fault, toward=None, **settings):
        super().__init__(1e12, latency=0, **settings)
        self.at, self.fault, self.toward, self.count, self.struck = at, fault, toward, 0, False

    def _submit(self, work, toward, **about):
        self.count += self.toward in (None, toward)
        if self.count != self.at or self.struck:
            return super()._submit(work, toward, **about)
        self.struck = True
        return super()._submit(lambda: self.fault(work), toward, **about)


def die(work):
    raise SystemExit


def fail(work):
    raise OSError("no such page\nand what else a driver says")


def dawdle(work):
    time.sleep(0.5)


@pytest.mark.parametrize(
    "fault, settings, says",
    [
        (die, {}, "the prefetch of layer 2 .* failed: SystemExit"),
        (fail, {}, r"the prefetch of layer 2 \(\d+ bytes toward the device\) failed: no such page$"),
        (dawdle, {"timeout": 0.05}, "the prefetch of layer 2 .* took longer than the timeout of 0.05 s"),
    ],
)
def test_a_broken_link_says_so_and_a_reset_cache_starts_over(fault, settings, says):
    model, ids = tiny("llama"), prompt(20)
    right = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), 6)
    link = Faulty(6, fault, "device", **settings)
    cache = kvlab.KVCache(model, place=Host(Whole(), link))
    with pytest.raises(LinkError, match=says):
        kvlab.decode(model, ids, cache, 6)
    with pytest.raises(RuntimeError, match="broke off: start again with"):
        kvlab.Stepper(model, cache).feed(prompt(1))  # never a token from half a step
    time.sleep(0.5 if fault is dawdle else 0)
    cache.reset()
    assert torch.equal(kvlab.decode(model, ids, cache, 6).tokens, right.tokens)


@pytest.mark.parametrize(
    "spec", ["offload:link=3", "quest:link=1e-3", "uvm:link=1e9,fault=1e7", "topk:link=1"]
)
def test_a_transfer_that_would_outlast_the_timeout_is_refused_before_it_begins(spec):
    """Who waited would see a minute's hang, and Ctrl-C ends no worker that sleeps for a day."""
    model, before = tiny("llama"), time.monotonic()
    with pytest.raises(LinkError, match=r"would take .* s, more than the timeout of 60 s$"):
        kvlab.decode(model, prompt(20), kvlab.make_cache(model, spec), 3)
    assert time.monotonic() - before < 30


def test_a_link_in_a_forked_process_says_so_at_once(monkeypatch):
    """Its threads stayed behind; who waited for them would wait for a minute, and hear of a slow link."""
    stepper = begun(tiny("llama"), "offload:link=1e9", prompt(20))
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(LinkError, match="threads are in the process that forked this one"):
        stepper.feed(prompt(1))


def one_number(work):
    parts = tuple(part.clone() for part in work())
    parts[-1].view(torch.uint8).view(-1)[5] ^= 64  # one bit of V
    return parts


FAULTS = {  # what is handed over; what a checksum sees: below
    "nothing": lambda work: None,
    "stale": lambda work: tuple(torch.full_like(part, 7) for part in work()),  # what was there before
    "short": lambda work: tuple(part[:, :, 1:] for part in work()),
    "other kind": lambda work: tuple(part.double() for part in work()),
    "keys alone": lambda work: work()[:1],
    "one number": one_number,
    "failed": fail,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize(
    "parts",
    [
        lambda: {},
        lambda: {"store": Growing(Int(4, group=8))},
        lambda: {"fetch": TopK(0.5), "store": Growing()},
    ],
    ids=["offload", "int4", "topk"],
)
def test_a_corrupt_transfer_is_an_error_and_never_a_wrong_token(fault, parts):
    """Every transfer of a prompt and two steps in turn: LinkError, or, if nobody wanted it, the same
    numbers; after a reset the cache is as good as new."""
    model, ids = tiny("llama", num_hidden_layers=2), prompt(12, rows=2)

    def decode(link):
        policies = {"fetch": Whole()} | parts()
        cache = kvlab.KVCache(model, store=policies.get("store"), place=Host(policies["fetch"], link))
        return cache, kvlab.decode(model, ids, cache, 3)

    link = Faulty(0, fault)
    right, errors = decode(link)[1], 0
    for at in range(1, link.count + 1):
        struck = Faulty(at, fault)
        try:
            found = decode(struck)[1]
        except LinkError as error:
            errors += 1
            assert "\n" not in str(error)
        else:
            assert struck.struck and torch.equal(found.logprobs, right.logprobs), at
    assert errors >= link.count // 2  # the others: ahead of a step that never came, or one row, swapped


def swapped(part, draw):
    flat = part.clone().view(-1)
    one, two = draw.sample(range(flat.numel()), 2)
    flat[[one, two]] = flat[[two, one]]
    return flat.view_as(part)


def one_bit(part, draw):
    flat = part.clone().view(torch.uint8).view(-1)
    flat[draw.randrange(flat.numel())] ^= 1 << draw.randrange(8)
    return flat.view(part.dtype).view_as(part)


CHANGES = {
    "roll": lambda part, draw: part.roll(draw.randint(1, part.shape[-1] - 1), -1),
    "swap": swapped,
    "bit": one_bit,
    "rows": lambda part, draw: part[:, :, draw.sample(range(9), 9)],
    "heads": lambda part, draw: part.flip(1),
    "half": lambda part, draw: torch.cat([part[:, :, :4], 0 * part[:, :, 4:]], 2),  # never came
}


@pytest.mark.parametrize("seed", range(8))
def test_a_checksum_knows_words_that_change_places(seed):
    draw = random.Random(seed)
    width, dtype = draw.choice(
        [(8, torch.float32), (32, torch.uint8), (20, torch.bfloat16), (3, torch.uint8)]
    )
    part = (torch.rand(2, 2, 9, width, generator=torch.Generator().manual_seed(seed)) * 99).to(dtype)
    for _ in range(40):
        other = CHANGES[draw.choice(list(CHANGES))](part, draw)
        assert torch.equal(other, part) == (checksum(other) == checksum(part))
    square = torch.tensor([[1, 2], [2, 1]], dtype=dtype)  # whose rows and columns have the sums of its mirror
    rows, columns = (torch.tensor(draw.sample(range(size), 2)) for size in (9, width))
    part[0, 0, rows[:, None], columns] = square
    known = checksum(part)
    part[0, 0, rows[:, None], columns] = square.flip(0)
    assert checksum(part) != known


@pytest.mark.parametrize("spec", ["offload", "topk:budget=0.5", "infinigen", "offload+h2o:budget=9"])
@pytest.mark.parametrize("look", ["stats", "deepcopy", "crop", "reorder", "keys", "save"])
def test_a_failed_write_that_somebody_meets_breaks_the_cache(spec, look, tmp_path):
    model, link = tiny("llama"), Faulty(0, fail, "host")
    read = parse(spec)
    stepper = begun(model, replace(read, parameters={**read.parameters, "link": link}), prompt(20))
    cache = stepper.cache
    cache.stats()
    link.count, link.at = 0, random.Random(spec + look).randint(1, 3)
    looks = {
        "stats": cache.stats, "deepcopy": lambda: copy.deepcopy(cache), "crop": lambda: cache.crop(-1),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "keys": lambda: [layer.keys for layer in cache.layers],
        "save": lambda: cache.save(tmp_path / "cache"),
    }  # fmt: skip
    try:
        stepper.feed(prompt(1))
        with contextlib.suppress(ValueError):  # what the method refuses by itself
            looks[look]()
        cache.stats()
    except RuntimeError as error:
        assert "failed" in str(error)
    with pytest.raises(RuntimeError, match=r"cache.reset\(\)"):
        stepper.feed(prompt(1))
    assert cache.broken
    cache.reset()
    assert kvlab.decode(model, prompt(9), cache, 2)
