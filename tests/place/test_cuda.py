"""What of a CUDA link can be tried without a GPU: the choice between its ways, and the kernel of one."""

from concurrent.futures import Future

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_here import needs_triton

from kvlab.link.cuda import TRIES, Trial
from kvlab.place import Transfer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def carried(size: int, seconds: float, error=None) -> Transfer:
    transfer = Transfer("fetch", 0, size, "device", started=1.0, finished=1.0 + seconds)
    transfer.future = Future()
    transfer.future.set_exception(error) if error else transfer.future.set_result(None)
    return transfer


def test_every_way_is_tried_and_the_faster_kept():
    trial, taken = Trial("slow", "fast"), []
    for turn in range(2 * TRIES + 6):
        way = trial.next()
        taken.append(way)
        seconds = 9.0 if turn < 2 else {"slow": 2.0, "fast": 1.0}[way]  # the first of each warms up
        trial.note(way, carried(10 * (1 + turn % 3), seconds * (1 + turn % 3)))
    assert taken == ["slow", "fast"] * (TRIES + 1) + ["fast"] * 4
    assert trial.best == "fast"
    assert trial.seconds_per_byte("slow") == 0.2 and trial.seconds_per_byte("fast") == 0.1


@needs_triton
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), held=st.integers(1, 40), spare=st.integers(0, 5),
    width=st.integers(1, 9), count=st.integers(0, 40), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.uint8]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_the_device_gathers_what_the_host_would(batch, heads, held, spare, width, count, seed, dtype):
    from kvlab.fast.zero_copy import gather

    generator = torch.Generator().manual_seed(seed)
    sizes, slots = (width, 2 * width), torch.randint(0, held, (batch, heads, count), generator=generator)
    parts = tuple(
        (torch.rand(batch, heads, held + spare, size, generator=generator) * 99).to(dtype) for size in sizes
    )
    parts = tuple((p.pin_memory() if DEVICE.type == "cuda" else p)[:, :, :held] for p in parts)
    slots = slots if count else None
    found = gather(parts, None if slots is None else slots.to(DEVICE), DEVICE)
    for part, got in zip(parts, found, strict=True):
        wanted = part if slots is None else part.gather(2, slots[..., None].expand(-1, -1, -1, part.shape[3]))
        assert got.dtype == dtype and got.shape == (*wanted.shape[:2], wanted.shape[2] + 1, part.shape[3])
        assert torch.equal(got[:, :, :-1].cpu(), wanted)
