"""The parts of a cache: each can be switched off, and what it costs is counted."""

import pytest
import torch

from course.teaching import lesson, mine
from kvlab.calibrate.skew import skew

TEXT = "The brown dog Otis lives in the mill. The red fox ran to the river. " * 4


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = lesson.start()
    return model, tokenizer, skew(model), tokenizer(TEXT, return_tensors="pt").input_ids


def fed(loaded, **settings):
    """Logits after the text's last token, and the cache."""
    model, _, turns, ids = loaded
    reader = mine.Reader(model, type("Own", (mine.Cache,), {"turns": turns, **settings})())
    reader.feed(ids[:, :-1])
    return reader.feed(ids[:, -1:]), reader.cache


def test_every_part_leaves_its_mark_and_all_of_them_together(loaded):
    full, cache = fed(loaded)
    tokens, size = loaded[3].shape[1], cache.stats().device_bytes
    assert cache.stats().tokens_held == tokens and size == sum(2 * K.nbytes for K in cache.K.values())
    parts = {"keep": "snapkv", "budget": 0.4, "bits": 4, "page": 16, "fetch": 0.2}
    for one in ({"keep": "norm_score", "budget": 0.4}, {"bits": 2}, {"fetch": 0.1}, parts):
        assert not torch.allclose(fed(loaded, **one)[0], full)
    stats = fed(loaded, **parts)[1].stats()
    assert stats.tokens_held == round(0.4 * (tokens - 1)) + 1
    assert 0 < stats.moved_bytes < stats.host_bytes < 0.3 * size and 0 < stats.device_bytes < stats.host_bytes
    pages = fed(loaded, page=16)[1].stats().device_bytes
    assert pages == size // tokens * -(-tokens // 16) * 16
