"""What a link to a GPU does, with a CPU in the GPU's place: pinned memory is ordinary memory here, and events
and streams are stand-ins. Bytes and copies are counted, nothing is timed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import kvlab
from kvlab.gather import by_head, by_token, gather_slots, slot_index
from kvlab.link import cuda
from kvlab.spec import parse
from tests.tiny import prompt, tiny


class Stands:
    """A stream, or an event."""

    def __getattr__(self, name):
        return lambda *given: None


@pytest.fixture
def link(monkeypatch):
    """A CudaLink whose pinned tensors are known by the memory they lie in, and that notes its copies."""
    pinned, plain, new = set(), torch.empty, torch.Tensor.new_empty

    def noted(x, pin: bool):
        if pin:
            pinned.add(x.untyped_storage().data_ptr())
            kept.append(x)
        return x

    kept: list = []
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **m: noted(plain(*a, **m), pin_memory))
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *a, pin_memory=False, **m: noted(new(self, *a, **m), pin_memory),
    )
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.untyped_storage().data_ptr() in pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    stands = {
        "is_available": lambda: True, "Stream": lambda *a: Stands(), "Event": lambda *a: Stands(),
        "stream": lambda one: contextlib.nullcontext(), "device": lambda one: contextlib.nullcontext(),
        "current_stream": lambda *a: Stands(),
    }  # fmt: skip
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    made = cuda.CudaLink("cuda")
    made.device, made._rows, made.copies = torch.device("cpu"), None, []
    copy = torch.Tensor.copy_

    def counted(self, other, non_blocking=False):
        if non_blocking:
            made.copies.append(
                SimpleNamespace(bytes=other.nbytes, whole=self.is_contiguous() and other.is_contiguous())
            )
        return copy(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return made


def decoded(model, method: str, link=None, steps: int = 40, rows: int = 2):
    """(Tokens, the cache) of a method over a link."""
    spec = parse(method)
    if link is not None:
        spec = type(spec)(spec.text, spec.method, spec.parameters | {"link": link})
    cache = kvlab.make_cache(model, spec)
    return kvlab.decode(model, prompt(23, rows=rows), cache, steps), cache


@pytest.mark.parametrize("method", ["offload", "offload+int4", "uvm:memory=0"])
def test_a_whole_layer_crosses_in_one_copy_of_each_part(link, method):
    model = tiny("llama")
    without, _ = decoded(model, method)
    there, cache = decoded(model, method, link)
    assert torch.equal(without.tokens, there.tokens) and without.moved_bytes == there.moved_bytes
    store = cache.attending[0].store
    parts = (*store.used()[0], *store.used()[1])
    assert all(part.is_pinned() and by_token(part).is_contiguous() for part in parts)
    inward = [r for r in link.records if r.toward == "device"]
    outward = [r for r in link.records if r.toward == "host"]
    assert len(link.copies) == len(parts) * (len(inward) + len(outward)) and all(
        one.whole for one in link.copies
    )
    assert sum(one.bytes for one in link.copies) == sum(r.bytes for r in (*inward, *outward))
    assert not link.staging.buffers, "nothing is gathered on the host"
    assert store.copies <= 2 * parts[0].shape[2], "a prompt's buffer has room: it is not copied at once"


@pytest.mark.parametrize(
    "method",
    [
        "offload+h2o:budget=0.7",
        "uvm+h2o:budget=0.7,memory=0.3",
        "topk:budget=5",
        "infinigen:budget=5,alpha=0.5",
        "offload+int4",
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_gpu_link_says_what_no_link_says(link, method, rows):
    model = tiny("llama")
    without, _ = decoded(model, method, rows=rows)
    there, _ = decoded(model, method, link, rows=rows)
    assert torch.equal(without.tokens, there.tokens) and without.moved_bytes == there.moved_bytes
    for one, other in zip(without.logprobs, there.logprobs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_where_tokens_go_step_by_step_the_host_moves_none_of_the_others(link, monkeypatch):
    """Slots stay empty for a while; what is held, and what a fork and a saved cache hold, is the same."""
    model = tiny("llama")
    _, plain = decoded(model, "offload+h2o:budget=0.9", steps=12)
    moved = []
    gathers = gather_slots
    monkeypatch.setattr(
        "kvlab.store.growing.gather_slots", lambda x, slots: moved.append(x) or gathers(x, slots)
    )
    _, cache = decoded(model, "offload+h2o:budget=0.9", link, steps=12)
    layers, parts, every = len(cache.attending), 2, 20 // 8
    assert len(moved) <= layers * parts * (1 + -(-12 // every))
    for one, other in zip(plain.attending, cache.attending, strict=True):
        held = other.slot_positions >= 0
        assert other.slots - max(other.rows_held) <= other.slots // 8
        assert torch.equal(one.slot_positions, other.slot_positions[held].view(one.slot_positions.shape))
        assert torch.allclose(one.keys, other.keys[held].view(one.keys.shape), atol=1e-5)
        assert one.rows_held == other.rows_held and one.mean_held == other.mean_held
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    plain.reorder_cache(torch.tensor([1, 0, 1]))
    ids = prompt(1, rows=3)
    here, there = (model(ids, past_key_values=one).logits for one in (plain, cache))
    assert torch.allclose(here, there, atol=1e-5)


def test_slots_are_found_in_either_order_of_memory():
    x = by_head(torch.rand(7, 2, 3, 5))
    slots = torch.randint(-1, 7, (2, 3, 4))
    wanted = x.gather(2, slots.clamp(min=0)[..., None].expand(-1, -1, -1, 5))
    for one in (x, x.contiguous(), x[..., :4]):
        flat, index = slot_index(one, slots)
        assert torch.equal(flat.index_select(0, index).view(*slots.shape, -1), wanted[..., : one.shape[3]])
        assert torch.equal(gather_slots(one, slots), wanted[..., : one.shape[3]])
