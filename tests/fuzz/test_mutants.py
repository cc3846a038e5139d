"""Twelve one-line mistakes in the methods, each caught by the one test that is named beside it.

A mutant is made in place: the function's code is compiled from its source with the line changed, and the
test runs in this process.
"""

import importlib
import inspect
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KEEP, PLACE, STORE = (f"reference/test_{name}.py" for name in ("keep", "place", "store"))
MUTANTS = {
    "sinks keeps the oldest of the window": (
        "kvlab.keep.sinks", "Sinks.score", "positions.float())", "-positions.float())",
        f"{KEEP}::test_kept_sets_and_outputs[sinks:budget=0.3,sinks=3-steps]",
    ),
    "h2o forgets what was received before": (
        "kvlab.keep.h2o", "H2O.observe", "+= so_far", "+= 0 * so_far",
        f"{KEEP}::test_kept_sets_and_outputs[h2o:budget=0.3,recent=0.5-steps]",
    ),
    "snapkv's window votes for itself": (
        "kvlab.keep.snapkv", "SnapKV.score", "recent | (positions < 0)", "positions < 0",
        f"{KEEP}::test_kept_sets_and_outputs[snapkv:budget=9,window=4,kernel=7-steps]",
    ),
    "tova asks the loudest head": (
        "kvlab.keep.tova", "TOVA.observe", "received.mean(1, keepdim=True)", "received.amax(1, keepdim=True)",
        f"{KEEP}::test_kept_sets_and_outputs[tova:budget=0.3-steps]",
    ),
    "pyramidkv stands on its head": (
        "kvlab.keep.pyramidkv", "PyramidKV.share", "index / (layers - 1)", "(1 - index / (layers - 1))",
        f"{KEEP}::test_pyramidkv[3]",
    ),
    "the pool spares one of the older half": (
        "kvlab.keep.pool", "Pool.score", "(held + 1) // 2", "(held - 1) // 2",
        f"{KEEP}::test_pool[0.7-5-lru]",
    ),
    "topk counts one token too few": (
        "kvlab.place.topk", "TopK.caps", "seen + 1 - appended", "seen - appended",
        f"{PLACE}::test_topk[0.2-]",
    ),
    "infinigen rounds the mean down": (
        "kvlab.place.infinigen", "InfiniGen.how_many", "math.ceil(", "math.floor(",
        f"{PLACE}::test_infinigen[infinigen:budget=9,alpha=0.4,ratio=0.3-9-0.4-0.3-20]",
    ),
    "integers are cut off, not rounded": (
        "kvlab.store.int", "Int.quantize", "torch.round(x / step)", "torch.floor(x / step)",
        f"{STORE}::test_integers[int8]",
    ),
    "kivi writes its window at once": (
        "kvlab.store.kivi", "KiviState.append", "self.prompt - self.recent +", "self.prompt +",
        f"{STORE}::test_kivi[20-kivi2:group=15,recent=5-15-5]",
    ),
    "the first queries of a prompt in pieces vote": (
        "kvlab.keep.base", "LastQueries.note", "[:, -self.policy.last_queries :]",
        "[:, : self.policy.last_queries]",
        "test_chunks.py::test_a_prompt_cut_anywhere_is_compressed_to_the_same_set[snapkv-left]",
    ),
    "a fork does not hold its blocks": (
        "kvlab.store.paged", "PagedState.__setattr__", "self.pool.hold(", "list(",
        "store/test_paged.py::test_forks_share_until_one_writes",
    ),
}  # fmt: skip


@contextmanager
def mutated(module: str, name: str, line: str, other: str):
    """The function `module.name` with `other` in place of `line`, wherever it has been imported to."""
    where, (owner, method) = importlib.import_module(module), name.split(".")
    owner = getattr(where, owner)
    function = getattr(owner, method)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{module}: {line!r} is there {source.count(line)} times"
    wrapped = "def make(__class__):\n" + textwrap.indent(source.replace(line, other), "    ")
    space: dict = {}
    text = f"from __future__ import annotations\n{wrapped}    return {method}"
    exec(compile(text, module, "exec"), vars(where), space)
    plain = function.__code__
    function.__code__ = space["make"](owner).__code__
    try:
        yield
    finally:
        function.__code__ = plain


def failures(test: str) -> tuple[int, int]:
    """(tests that failed, tests that ran) of a node, in this process."""

    class Count:
        failed = ran = 0

        def pytest_runtest_logreport(self, report):
            if report.when == "call":
                self.ran, self.failed = self.ran + 1, self.failed + report.failed

    count = Count()
    quiet = ["-o", "addopts=--import-mode=importlib", "-p", "no:terminal", "-p", "no:cacheprovider"]
    pytest.main([str(TESTS / test), "-x", *quiet], [count])
    return count.failed, count.ran


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_the_test_that_is_named(name):
    *mutant, test = MUTANTS[name]
    with mutated(*mutant):
        failed, _ = failures(test)
    assert failed == 1


def test_without_a_mutant_the_same_tests_pass():
    test = MUTANTS["tova asks the loudest head"][-1]
    assert failures(test) == (0, 1)
