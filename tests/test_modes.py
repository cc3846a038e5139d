"""A cache goes through torch's modes: what was made in one of them is written into in another."""

import copy
import random
from contextlib import suppress

import pytest
import torch
from families.profiles import profiled
from tiny import EACH, prompt, tiny

import kvlab

MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
MANAGED = [spec for spec in EACH if spec != "recompute"]


def changed(cache, how: str, tmp_path, model):
    """The cache after something that one does between passes, if it can be done to it."""
    with suppress(ValueError, NotImplementedError):
        if how == "copy":
            return copy.deepcopy(cache)
        if how == "save":
            cache.save(tmp_path / "cache")
            return kvlab.load_cache(tmp_path / "cache", model)
        if how == "crop":
            cache.crop(-2)
        if how == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        if how == "hold":
            cache.hold()
    return cache


@pytest.mark.parametrize("spec", MANAGED)
def test_every_mode_gives_the_same(spec, tmp_path):
    seed = random.randrange(10**6)
    draw, model = random.Random(seed), kvlab.prepare(copy.deepcopy(tiny("llama")))
    story = [draw.choice(("copy", "save", "crop", "reorder", "hold", "turn", "step")) for _ in range(12)]
    padding = draw.choice((0, 5))

    def told(modes) -> list:
        found, cache = [], kvlab.make_cache(model, profiled(spec, model))
        for at, (mode, how) in enumerate(zip(modes, ["prompt", *story], strict=True)):
            with mode():
                tokens = {"prompt": 20, "turn": 4}.get(how, 1)
                cache = changed(cache, how, tmp_path, model)
                seen = cache.get_seq_length()
                mask = torch.ones(2, seen + tokens, dtype=torch.long)
                for row, real in zip(mask, cache.lengths or (-padding, 0), strict=True):
                    row[: seen - real] = 0
                given = {"attention_mask": mask, "past_key_values": cache}
                try:
                    found.append(model(prompt(tokens, 2, seed=at), **given).logits.detach())
                except ValueError as error:  # as of a turn after `hold`
                    found.append(str(error))
        return found

    expected = told([torch.no_grad] * 13)
    for one, other in zip(told([draw.choice(MODES) for _ in range(13)]), expected, strict=True):
        same = one == other if isinstance(one, str) else torch.equal(one, other)
        assert same, (seed, story, padding)
