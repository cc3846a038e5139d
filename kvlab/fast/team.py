"""Team: threads that share the rows of a compiled product. The work never waits for a thread that is absent.

One thread leads: it runs the whole function and can do so alone. Helpers run the same function on the same
arrays at the same time. In every product each thread takes some rows (`taken`) until no rows are left. If a
helper comes late, or never (as in a forked process), only time is lost. The leader alone computes everything
between two products: it waits until the rows taken by others are done (`joined`), and then lets helpers go on
to the next part (`opened`). The same code computes a row in every thread, so results do not depend on
threads.

A team is a table of counters, int64 `[COUNTERS, LINE]`, zeros at first, for one call of the function. An
empty table means that there is no team and the leader is alone.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LINE = 8  # numbers of a line of the processor's caches: counters lie in lines of their own
OPEN, DUE, DONE, PRODUCTS = range(4)  # the part that is open; shares to be done, and done; then those taken
COUNTERS = PRODUCTS + 8
ALONE = 2**21  # multiplications up to which a call is one thread's: to wake another takes as long
SHARE = 2**16  # numbers of a matrix that a thread takes at a time, about
PATIENCE = 2**22  # looks at a counter, about a millisecond, before a helper leaves
LOST, NEVER = 1, 2**40  # beside a counter of shares that are done: a helper failed; more than are ever due
NOWHERE = -1  # in the place of a processor's number
NOBODY = np.zeros((0, LINE), np.int64)


@intrinsic
def _add(context, team, counter, number):
    """Add to a counter, as one operation for all threads; returns what it was."""

    def code(context, builder, signature, given):
        place = _place(context, builder, signature, given)
        return builder.atomic_rmw("add", place, given[2], "seq_cst")

    return types.int64(team, types.int64, types.int64), code


@intrinsic
def _look(context, team, counter):
    """Read a counter, and make all writes visible that were made before the counter took this value."""

    def code(context, builder, signature, given):
        return builder.load_atomic(_place(context, builder, signature, given), "seq_cst", 8)

    return types.int64(team, types.int64), code


def _place(context, builder, signature, given):
    table = context.make_array(signature.args[0])(context, builder, given[0])
    return builder.gep(table.data, [builder.mul(given[1], ir.Constant(ir.IntType(64), LINE))])


@njit
def taken(team, product, size, most):
    """The first of the up to `size` rows that this thread takes from a product's `most`; `most` if none is
    left."""
    return min(_add(team, PRODUCTS + product, 1) * size, most)


@njit
def due(team, shares):
    """The leader announces how many more shares a product needs before it is finished."""
    team[DUE, 0] += shares


@njit
def done(team):
    """Count a share that a thread has finished."""
    _add(team, DONE, 1)


@njit
def joined(team):
    """The leader waits until the rows that others took are finished."""
    if team.shape[0]:
        while _look(team, DONE) < team[DUE, 0]:
            pass


@njit
def opened(team, part, leads):
    """The leader lets helpers into a part, 1 and so on; helpers wait for it. False if a helper has waited
    too long because the leader is not running."""
    if team.shape[0] == 0:
        return True
    if leads:
        _add(team, OPEN, part - team[OPEN, 0])
        return True
    looks = 0
    while looks < PATIENCE and _look(team, OPEN) < part:
        looks += 1
    return looks < PATIENCE


def together(numbers: int, function, *given, teams: int = 1):
    """The result of `function(*given, team, leads)` for the leader. If the function multiplies often enough
    to make waking others worthwhile, it runs on as many threads as torch has. teams: how many teams the
    function needs, one after another. Raises RuntimeError if another thread failed, since its share may be
    missing."""
    team, threads = NOBODY, torch.get_num_threads() if numbers > ALONE else 1
    if threads > 1:
        team, here = np.zeros((teams * COUNTERS, LINE), np.int64), _processor()
        for _ in range(threads - 1):
            helpers().put((here, function, *given, team, False))
    found = function(*given, team, True)
    if threads > 1 and team[DONE::COUNTERS, LOST].any():
        raise RuntimeError("a thread beside this one failed in a compiled step, whose result is not whole")
    return found


@cache
def helpers() -> SimpleQueue:
    """Calls, `(the leader's processor, function, *arguments)`, that other threads of this process make
    alongside the calling thread. Their results are never read, so no future is made for them, which would
    take the leader 25 µs."""
    calls = SimpleQueue()
    for _ in range(max(os.cpu_count() or 1, torch.get_num_threads())):
        Thread(target=_help, args=(calls,), daemon=True, name="kvlab helper").start()
    return calls


def _help(calls: SimpleQueue) -> None:
    while True:
        here, function, *given = calls.get()
        try:
            if _apart(here):
                function(*given)
        except Exception:  # it may have taken a share that nobody does now, so nobody waits for it
            given[-2][DONE::COUNTERS] = NEVER
        del function, given  # no array lives until the next call


def _apart(leader: int) -> bool:
    """Whether this thread runs on another processor than the leader; it moves there if it may. Linux wakes a
    thread on the processor on which it last ran. A helper that once ran on the leader's processor would
    return to it at every step, and keep the leader from running until it gives up."""
    if leader == NOWHERE or _processor() != leader:
        return True
    with suppress(OSError):  # of a system that lets nobody move
        others = os.sched_getaffinity(os.getpid()) - {leader}  # of those that the process may use
        if others:
            os.sched_setaffinity(0, others)
            return True
    return False


try:
    _processor = ctypes.CDLL(None).sched_getcpu  # the number of the processor on which this thread runs
except (AttributeError, OSError, TypeError):  # Linux alone says it
    _processor = lambda: NOWHERE


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=helpers.cache_clear)  # its threads are not there
