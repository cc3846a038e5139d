"""How prompts and their steps are grouped: every item once, within the limits, padded as little as may be."""

import random
from itertools import pairwise

import pytest

from eval.accuracy.batching import pack


def passed(groups, methods):
    """Tokens that pass: prompts once, padded to the longest; steps once a method, padded to the most."""
    prompts = sum(len(group) * max(prompt for prompt, _ in group) for group in groups)
    return prompts + methods * sum(len(group) * max(steps for _, steps in group) for group in groups)


def packed(items, methods=1, batch=8, longest=10_000, tokens=10_000):
    return pack(
        items, lambda item: item[0], batch, steps=lambda item: item[1], longest=longest, tokens=tokens,
        methods=methods,
    )  # fmt: skip


def drawn(seed, prompts, steps, count=61):
    draw = random.Random(seed)
    return [(draw.randint(*prompts), draw.randint(*steps)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_every_item_is_in_one_group_that_keeps_the_limits(seed):
    items = drawn(seed, (0, 90), (1, 40))
    groups = packed(items, methods=3, longest=110, tokens=300)
    assert sorted(item for group in groups for item in group) == sorted(items)
    for group in groups:
        prompts, steps = zip(*group, strict=True)
        assert len(group) <= 8
        assert all(prompts) or not any(prompts)  # an empty prompt is not padded to a longer one
        if len(group) > 1:
            assert max(prompts) + max(steps) <= 110
            assert len(group) * max(prompts) <= 300


@pytest.mark.parametrize("seed", range(3))
def test_no_other_parting_takes_less_work(seed):
    """Of every way to part them."""
    items = sorted(drawn(seed, (1, 200), (1, 2), count=9), reverse=True)
    work = lambda groups: passed(groups, 2) + sum(32 * (1 + 2 * max(s for _, s in group)) for group in groups)
    every = []
    for cuts in range(2**8):
        ends = [i + 1 for i in range(8) if cuts >> i & 1]
        groups = [items[a:b] for a, b in pairwise([0, *ends, 9])]
        every.append(work(groups) if max(map(len, groups)) <= 4 else float("inf"))
    assert work(packed(items, methods=2, batch=4)) <= min(every)


def test_too_long_for_any_group_stands_alone():
    assert packed([(50, 5), (400, 5), (40, 5)], longest=100) == [[(400, 5)], [(50, 5), (40, 5)]]


def test_without_steps_prompts_go_by_length():
    assert pack([3, 9, 1, 8], lambda item: item, 2) == [[9, 8], [3, 1]]
