"""Threads that share out a compiled step's products: the same bits as one thread, whoever comes and when."""

import copy
import os
import threading

import numpy as np
import pytest
import torch
from fast.stepped import decoded
from tiny import prompt, tiny

from kvlab.fast import block, team
from kvlab.fast.compiled import compiled
from kvlab.fast.narrow import rounded

NOTHING = np.empty(0, np.float32)
EPS = 1e-5


@pytest.fixture(autouse=True)
def all_calls(monkeypatch):
    """Calls of any size are shared out; torch has as many threads afterwards as before."""
    monkeypatch.setattr(team, "ALONE", -1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Into:
    """A norm and three products, whose sizes leave rests of every kind: rows of four, shares, threads."""

    def __init__(self, rows: int, kind: str = "fp32", hidden: int = 1001, counts=(4120, 37, 3)):
        torch.manual_seed(rows)
        weights = [torch.randn(count, hidden) for count in counts]
        self.x, norm, biases = torch.randn(rows, hidden), torch.rand(hidden), [torch.randn(n) for n in counts]
        biases[1] = torch.zeros(0)
        linears = [
            (weight.numpy(), NOTHING, bias.numpy()) for weight, bias in zip(weights, biases, strict=True)
        ]
        if kind == "int8":
            narrow = [rounded(weight, kind) for weight in weights]
            weights = [codes.float() * scale[:, None] for codes, scale in narrow]
            linears = [
                (codes.numpy(), scale.numpy(), bias.numpy())
                for (codes, scale), bias in zip(narrow, biases, strict=True)
            ]
        scaled = self.x * (self.x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm
        self.expected = [
            scaled @ weight.T + (bias if len(bias) else 0)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        turns, self.room = np.empty((rows, 0), np.float32), np.empty(2 * rows * hidden, np.float32)
        self.found = [np.full((rows, 1, 1, count), 99, np.float32) for count in counts]
        heads = NOTHING, NOTHING, turns, turns
        self.given = self.x.numpy(), norm.numpy(), np.float32(EPS), *linears, *heads, *self.found, self.room

    def call(self, threads: int) -> list[np.ndarray]:
        torch.set_num_threads(threads)
        for each in self.found:
            each.fill(99)
        team.together(0, block.into, *self.given)
        return [each.copy() for each in self.found]

    def right(self, found) -> bool:
        pairs = zip(found, self.expected, strict=True)
        return all(np.allclose(a[:, 0, 0], b.numpy(), atol=1e-4 * float(b.abs().max())) for a, b in pairs)


def same(first, second) -> bool:
    return all(map(np.array_equal, first, second))


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 14, 64])
def test_threads_compute_the_bits_of_one(rows, kind):
    case = Into(rows, kind)
    alone = case.call(1)
    assert case.right(alone)
    for threads in (2, 3, 2, 3):
        assert same(case.call(threads), alone)


def test_helpers_that_come_first_late_or_never(monkeypatch):
    case = Into(3)
    alone, jobs = case.call(1), []

    class Kept:
        def put(self, job):
            jobs.append(job)

    monkeypatch.setattr(team, "helpers", Kept)
    assert same(case.call(3), alone) and len(jobs) == 2, "never"
    table = jobs[0][-2]
    assert table[team.DONE, 0] == table[team.DUE, 0] > 60, "in many shares"
    for _, function, *given in jobs:
        function(*given)
    assert same(case.found, alone), "late: nothing is left"

    class First:
        def put(self, job):
            job[1](*job[2:])  # the leader has not begun

    monkeypatch.setattr(team, "helpers", First)
    assert same(case.call(2), alone), "it has left again"


def test_a_helper_does_what_the_leader_does_not():
    """Another thread opens the first part and computes nothing: the helper alone does all of it."""
    case = Into(2)
    alone = case.call(1)
    team.together(0, block.into, *case.given)  # what products read between them lies in `room`
    for each in case.found:
        each.fill(99)
    table = np.zeros((team.COUNTERS, team.LINE), np.int64)
    table[team.OPEN, 0] = 4
    block.into(*case.given, table, False)
    assert same(case.found, alone) and table[team.DONE, 0] > 60 and table[team.DUE, 0] == 0


def layers(rows: int = 2, hidden: int = 96, inner: int = 130) -> dict[str, tuple]:
    """What functions of a block are given, but for team and leads: a layer's end."""
    draw = np.random.default_rng(5)
    some = lambda *shape: draw.standard_normal(shape).astype(np.float32)
    linear = lambda count, width: (some(count, width), NOTHING, NOTHING)
    room = np.zeros(2 * rows * (hidden + inner), np.float32)
    end = (some(rows, hidden), some(rows, hidden), linear(hidden, hidden), some(hidden), np.float32(EPS))
    end += (linear(inner, hidden), linear(inner, hidden), linear(hidden, inner))
    return {
        "out_of": (*end, room),
        "logits": (*end, some(hidden), linear(40, hidden), np.zeros((rows, 40), np.float32), room),
    }


@pytest.mark.parametrize("name", ["out_of", "logits"])
def test_a_helper_stays_out_of_what_the_leader_has_not_opened(name):
    """Products by parts: 0; 1 and 2; 3; 4 and more. Where it may not go in, it takes nothing of them."""
    firsts = {1: 0, 2: 1, 3: 3, 4: 4}
    for part, first in firsts.items():
        table = np.zeros((team.COUNTERS, team.LINE), np.int64)
        table[team.OPEN, 0] = part - 1
        getattr(block, name)(*layers()[name], table, False)
        taken = table[team.PRODUCTS :, 0]
        assert not taken[first:].any() and (taken[:first] > 0).all()


@pytest.mark.parametrize("name", ["out_of", "logits"])
def test_the_leader_waits_for_rows_that_another_has_taken(name):
    """It goes no further than the part in which a share is missing, and ends when that is there."""
    given = layers()[name]
    alone = layers()[name]
    getattr(block, name)(*alone, team.NOBODY, True)
    table = np.zeros((team.COUNTERS, team.LINE), np.int64)
    table[team.DUE, 0] = 1
    leader = threading.Thread(target=getattr(block, name), args=(*given, table, True), daemon=True)
    leader.start()
    leader.join(0.3)
    assert leader.is_alive() and table[team.OPEN, 0] == 1
    team.done(table)
    leader.join(60)
    assert not leader.is_alive() and np.array_equal(given[1], alone[1])


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_models_steps_on_threads_are_those_on_one(family, weights, steps, monkeypatch):
    """The prompt is torch's own work, on one thread each time."""
    torch.set_num_threads(1)
    fast = compiled(copy.deepcopy(tiny(family)), weights)
    prompts, found = [prompt(12), prompt(12, seed=3)], []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        found.append(decoded(fast, "int8", prompts))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and len(steps) == 3 * 8
    if weights == "fp32":
        expected = decoded(tiny(family), "int8", prompts)
        assert (found[0] - expected).norm() <= 0.02 * expected.norm()


def test_two_threads_that_step_at_once(monkeypatch):
    torch.set_num_threads(1)
    fast = compiled(copy.deepcopy(tiny("llama")))
    texts, found = [prompt(9), prompt(14, seed=1)], {}
    expected = [decoded(fast, "full", [text] * 2, count=30) for text in texts]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def run(index):
        found[index] = decoded(fast, "full", [texts[index]] * 2, count=30)

    both = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert all(torch.equal(found[index], expected[index]) for index in range(2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_threads_of_its_own():
    case = Into(1)
    alone, before = case.call(2), team.helpers()
    child = os.fork()
    if child == 0:
        came = threading.Event()
        team.helpers().put((team.NOWHERE, came.set))
        new = team.helpers() is not before and came.wait(60)
        os._exit(0 if new and same(case.call(2), alone) else 1)
    assert os.waitpid(child, 0)[1] == 0 and team.helpers() is before


def test_nan_does_not_vanish_on_threads():
    case = Into(2)
    case.given[3][0][500, 7] = np.nan
    found = case.call(2)[0][:, 0, 0]
    assert np.isnan(found[:, 500]).all() and np.isnan(found).sum() == 2


def test_a_helper_that_fails_with_a_share_is_said_and_not_waited_for():
    """It has taken what nobody else does then: no result, and no leader that waits for ever."""
    torch.set_num_threads(2)
    took = threading.Event()

    def step(counters, leads):
        if not leads:
            team.taken(counters, 0, 1, 1)
            took.set()
            raise MemoryError("no room")
        team.due(counters, 1)
        assert took.wait(60)
        while not counters[team.DONE, team.LOST]:
            pass
        team.joined(counters)
        return "a result"

    with pytest.raises(RuntimeError, match="beside this one failed"):
        team.together(0, step)
    assert team.together(0, lambda counters, leads: leads), "the next step is whole"
