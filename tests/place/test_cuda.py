"""What of a CUDA link can be tried without a GPU: its kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_here import needs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
