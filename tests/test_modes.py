"""A cache goes through torch's modes: what was made in one of them is written into in another."""

import copy
import random
from contextlib import nullcontext, suppress

import pytest
import torch
from every import EVERY, make
from families.models import family
from tiny import prompt

import kvlab

MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
NAMES = ("Llama", "OPT", "Gemma 3", "Llama 4", "LFM2", "Qwen3-Next", "DeepSeek-V2")
WAYS = ("copy", "save", "crop", "reorder", "hold", "turn", "step", "step")  # what is done before a pass
MANAGED = [*EVERY, "int4:sinks=40", "quest:budget=200,page=5,full_layers=0"]


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


def served(spec: str, draw: random.Random):
    """A model of a drawn family that the method serves."""
    for name in draw.sample(NAMES, len(NAMES)):
        with suppress(ValueError):
            model = kvlab.prepare(copy.deepcopy(family(name)))
            make(model, spec)
            return model


@pytest.mark.parametrize("spec", MANAGED)
def test_every_mode_gives_the_same(spec, tmp_path):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    model = served(spec, draw)
    story = ["prompt", *(draw.choice(WAYS) for _ in range(12))]
    padding, piece = draw.choice((0, 5)), draw.choice((3, 20))

    def told(modes) -> list:
        found = []
        for at, (mode, how) in enumerate(zip(modes, story, strict=True)):
            with mode():
                if how == "prompt":
                    cache = make(model, spec)
                cache = changed(cache, how, tmp_path, model)
                tokens = {"prompt": 20, "turn": 4}.get(how, 1)
                ids, seen = prompt(tokens, 2, seed=at), cache.get_seq_length()
                mask = torch.ones(2, seen + tokens, dtype=torch.long)
                for row, real in zip(mask, cache.lengths or (-padding, 0), strict=True):
                    row[: seen - real] = 0
                try:
                    with cache.prefill() if how == "prompt" else nullcontext():
                        for part in ids.split(piece, 1):
                            seen += part.shape[1]
                            given = {"attention_mask": mask[:, :seen], "past_key_values": cache}
                            found.append(model(part, **given).logits.detach())
                except ValueError as error:  # as of a turn after `hold`
                    found.append(str(error))
        return found

    expected = told([torch.no_grad] * len(story))
    for one, other in zip(told([draw.choice(MODES) for _ in story]), expected, strict=True):
        same = one == other if isinstance(one, str) else torch.equal(one, other)
        assert same, (seed, story, padding, piece)
