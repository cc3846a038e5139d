"""A run that takes over another run's codes: what differs by rounding is a tie, what is wrong is not."""

import pytest
import torch

from eval.gpu import right
from eval.gpu.led import Led
from kvlab.store import Int

IDS = torch.randint(0, 512, (2, 48 + right.STEPS), generator=torch.Generator().manual_seed(2))
CODED = ("int8", "int4", "kivi2", "offload+int4")


def logits(model, method: str, led=None):
    return right.logits_of(model, method, IDS, 48, masked=7, led=led)


@pytest.fixture(scope="module")
def models():
    """A model, and one whose weights are rounded otherwise, as another device would compute."""
    here, there = (right.small_model(torch.device("cpu"), torch.float32) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in there.parameters():
            weight.mul_(1 + 2e-7 * torch.randn(weight.shape, generator=generator))
    return here, there


@pytest.mark.parametrize("method", CODED)
def test_codes_that_rounding_turns_are_ties_and_what_follows_is_taken_over(models, method):
    here, there = models
    leader = Led()
    found, led = logits(there, method, leader), Led(leader)
    assert (found - logits(here, method, led)).abs().max() < 2e-5
    assert led.differ > 0 == led.apart and led.sets == 0 and led.numbers == 2 * 2 * 2 * 64 * 4 * 56


@pytest.mark.parametrize(("kind", "method"), [(Int, "int4"), (Int, "int8"), (Int, "kivi2")])
def test_codes_that_are_wrong_are_no_ties(models, kind, method, monkeypatch):
    here, leader = models[0], Led()
    name = "quantize" if method == "kivi2" else "write"  # KIVI writes K's blocks by hand
    plain = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, x, *more: plain(self, x * 0.95, *more))
    logits(here, method, leader)
    monkeypatch.undo()
    led = Led(leader)
    logits(here, method, led)
    assert led.apart > 300
