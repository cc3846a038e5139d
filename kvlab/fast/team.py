"""Team: threads that share out the rows of a compiled product among themselves, none of which is waited for.

One thread leads: it runs the whole function, and could do so alone. Helpers run the same function on the same
arrays at the same time: in every product each takes some rows (`taken`) until none is left, so one that comes
late, or never, as in a process that was forked, costs time alone. What lies between products is the leader's:
it waits until the rows that others took are there (`joined`), and then lets helpers in to what comes next
(`opened`). Every row is computed by the same code whoever takes it, so a result does not depend on threads.

A team is a table of counters, int64 `[COUNTERS, LINE]`, zeros at first, for one call of the function; an
empty one is no team: the leader is alone.
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
    """A counter, and with it all that was written before it became so."""

    def code(context, builder, signature, given):
        return builder.load_atomic(_place(context, builder, signature, given), "seq_cst", 8)

    return types.int64(team, types.int64), code


def _place(context, builder, signature, given):
    table = context.make_array(signature.args[0])(context, builder, given[0])
    return builder.gep(table.data, [builder.mul(given[1], ir.Constant(ir.IntType(64), LINE))])


@njit
def taken(team, product, size, most):
    """The first of up to `size` rows that this thread takes of a product's `most`; `most`: none is left."""
    return min(_add(team, PRODUCTS + product, 1) * size, most)


@njit
def due(team, shares):
    """The leader says that so many more shares will have been done when a product is."""
    team[DUE, 0] += shares


@njit
def done(team):
    """A thread has done a share."""
    _add(team, DONE, 1)


@njit
def joined(team):
    """The leader waits until the rows that others took are there."""
    if team.shape[0]:
        while _look(team, DONE) < team[DUE, 0]:
            pass


@njit
def opened(team, part, leads):
    """The leader lets helpers into a part, 1 and so on; helpers wait for it: False to one whose patience is
    at its end, since the leader does not run."""
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
    """What `function(*given, team, leads)` returns to the leader; where it multiplies so often that it pays
    to wake others, on as many threads as torch has. teams: how many the function needs, one after another.
    RuntimeError where another thread failed, which may have taken a share that nobody has done."""
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
    """Calls, `(the leader's processor, function, *arguments)`, that threads of this process make beside the
    one that asks. Nobody asks what comes of them, so nothing is made for that, which would take the leader
    25 µs."""
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
    """Whether this thread is on another processor than the leader's; it moves where it may. Linux wakes a
    thread where it last ran: one that has been on the leader's processor would come back to it, keep the
    leader from running for as long as its patience lasts, and leave, at every step."""
    if leader == NOWHERE or _processor() != leader:
        return True
    with suppress(OSError):  # of a system that lets nobody move
        others = os.sched_getaffinity(os.getpid()) - {leader}  # of those that the process may use
        if others:
            os.sched_setaffinity(0, others)
            return True
    return False


def _processor() -> int:
    """The number of the one on which this thread runs; `NOWHERE` on systems that do not say."""
    return NOWHERE if sched_getcpu is None else sched_getcpu()


def _of_libc():
    """Linux's `sched_getcpu`; None elsewhere."""
    with suppress(AttributeError, OSError, TypeError):
        return ctypes.CDLL(None).sched_getcpu
    return None


sched_getcpu = _of_libc()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=helpers.cache_clear)  # its threads are not there
