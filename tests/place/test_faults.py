"""What can go wrong with a link: a clear error, and a reset cache that starts over; never a wrong token."""

import time

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.place import Host, LinkError, ModelledLink, TopK, Whole
from kvlab.store import Static


class Breaking(ModelledLink):
    """A link that breaks at the n-th fetch: its work is replaced by `fault`."""

    def __init__(self, at, fault, **settings):
        super().__init__(1e9, **settings)
        self.at, self.fault, self.count = at, fault, 0

    def _submit(self, work, toward, **about):
        self.count += toward == "device"
        broken = toward == "device" and self.count == self.at
        return super()._submit(self.fault if broken else work, toward, **about)


def die():
    raise SystemExit


def fail():
    raise OSError("no such page")


def dawdle():
    time.sleep(0.5)


@pytest.mark.parametrize(
    "fault, settings, says",
    [
        (die, {}, "the prefetch of layer 2 .* failed: SystemExit"),
        (fail, {}, r"the prefetch of layer 2 \(\d+ bytes toward the device\) failed: no such page"),
        (dawdle, {"timeout": 0.05}, "the prefetch of layer 2 .* took longer than the timeout of 0.05 s"),
    ],
)
def test_a_broken_link_says_so_and_a_reset_cache_starts_over(fault, settings, says):
    model, ids = tiny("llama"), prompt(20)
    right = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), 6)
    link = Breaking(7, fault, **settings)
    cache = kvlab.KVCache(model, place=Host(Whole(), link))
    with pytest.raises(LinkError, match=says):
        kvlab.decode(model, ids, cache, 6)
    with pytest.raises(RuntimeError, match="broke off: start again with"):
        kvlab.Stepper(model, cache).feed(prompt(1))  # never a token from half a step
    time.sleep(0.5 if fault is dawdle else 0)
    cache.reset()
    assert torch.equal(kvlab.decode(model, ids, cache, 6).tokens, right.tokens)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_an_interrupt_while_a_transfer_is_awaited(layer, monkeypatch):
    model, ids = tiny("llama"), prompt(20)
    right = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), 6)
    cache = kvlab.make_cache(model, "offload:link=1e8")
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids)
    waits, plain = [], kvlab.place.Transfer.wait

    def wait(self):
        if self.toward == "device" and self.layer == layer and not waits:
            waits.append(self)
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(kvlab.place.Transfer, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        stepper.feed(prompt(1))
    with pytest.raises(RuntimeError, match="broke off"):
        stepper.feed(prompt(1))
    cache.reset()
    assert torch.equal(kvlab.decode(model, ids, cache, 6).tokens, right.tokens)


def test_a_host_buffer_that_is_full_says_so():
    model = tiny("llama")
    cache = kvlab.KVCache(model, store=Static(22), place=Host(TopK(0.5), ModelledLink(1e9)))
    with pytest.raises(ValueError, match="static: 23 tokens do not fit into a buffer of length=22"):
        kvlab.decode(model, prompt(20), cache, 6)
