"""One-line mistakes in the methods and engines, each caught by the one test that is named beside it.

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
# What goes wrong, in which function, the line as it is and as it becomes, and the test that fails.
TABLE = """
sinks keeps the oldest of the window
    keep.sinks:Sinks.score
    - positions.float())
    + -positions.float())
    reference/test_keep.py::test_kept_sets_and_outputs[sinks:budget=0.3,sinks=3-steps]

h2o forgets what was received before
    keep.h2o:H2O.observe
    - += so_far
    + += 0 * so_far
    reference/test_keep.py::test_kept_sets_and_outputs[h2o:budget=0.3,recent=0.5-steps]

snapkv's window votes for itself
    keep.snapkv:SnapKV.score
    - window | (positions < 0)
    + positions < 0
    reference/test_keep.py::test_kept_sets_and_outputs[snapkv:budget=9,window=4,kernel=7-steps]

tova asks the loudest head
    keep.tova:TOVA.observe
    - all_heads(layer, received).mean(1, keepdim=True)
    + all_heads(layer, received).amax(1, keepdim=True)
    reference/test_keep.py::test_kept_sets_and_outputs[tova:budget=0.3-steps]

pyramidkv stands on its head
    keep.pyramidkv:PyramidKV.share
    - index / (layers - 1)
    + (1 - index / (layers - 1))
    reference/test_keep.py::test_pyramidkv[3]

the pool spares one of the older half
    keep.pool:Pool.score
    - (held + 1) // 2
    + (held - 1) // 2
    reference/test_keep.py::test_pool[0.7-5-lru]

topk counts one token too few
    place.topk:TopK.caps
    - seen + 1 - appended
    + seen - appended
    reference/test_place.py::test_topk[0.2-]

infinigen rounds the mean down
    place.infinigen:InfiniGen.how_many
    - math.ceil(
    + math.floor(
    reference/test_place.py::test_infinigen[infinigen:budget=9,alpha=0.4,ratio=0.3-9-0.4-0.3-20]

integers are cut off, not rounded
    store.int:Int.quantize
    - torch.round(x / step)
    + torch.floor(x / step)
    reference/test_store.py::test_integers[int8]

kivi writes its window at once
    store.kivi:KiviState.due
    - self.prompt - self.recent +
    + self.prompt +
    reference/test_store.py::test_kivi[20-kivi2:group=15,recent=5-15-5]

the first queries of a prompt in pieces vote
    keep.state:LastQueries.note
    - [:, -self.policy.last_queries :]
    + [:, : self.policy.last_queries]
    test_windows.py::test_a_prompt_in_pieces_holds_what_somebody_may_still_see[snapkv:budget=5,window=4-0]

a fork does not hold its blocks
    store.paged:PagedState.__setattr__
    - self.pool.hold(
    + list(
    store/test_paged.py::test_forks_share_until_one_writes

adakv protects nobody's share
    keep.adakv:AdaKV.shares
    - (rank < safe)
    + (rank < 0)
    reference/test_keep.py::test_heads_of_different_lengths[adakv:of=keydiff,budget=0.3,safeguard=1-steps]

kvzip meets a budget of one token less
    keep.kvzip:KVzip.agree
    - counts(ranked, sum(limits))
    + counts(ranked, sum(limits) - 1)
    keep/test_kvzip.py::test_the_budget_is_met_over_all_layers_and_heads

snapkv's neighbours are slots
    keep.snapkv:largest_near
    - (positions < 0).int()
    + (positions < -1).int()
    keep/test_parameters.py::test_what_compresses_now_and_then_chooses_in_a_padded_batch_as_alone[snapkv]

lagkv compares the last block with nothing
    keep.lagkv:LagKV.parts
    - // lag - 1)
    + // lag)
    reference/test_keep.py::test_kept_sets_and_outputs[lagkv:budget=0.4,lag=3,sinks=2-steps]

expected attention varies twice as much
    keep.expected:ExpectedAttention.score
    - layer.scaling**2 / 2
    + layer.scaling**2
    reference/test_keep.py::test_kept_sets_and_outputs[expected:budget=0.3,future=40,sinks=2-steps]

renumbered tokens end one too late
    models.rope:renumbered
    - keepdim=True) + order
    + keepdim=True) + order + 1
    keep/test_parameters.py::test_renumbered_attention_is_its_definition[sinks:budget=9,renumber=true]

quest's bound is the least
    place.quest:Quest.bounds
    - state.high.transpose
    + state.low.transpose
    reference/test_place.py::test_quest_where_every_head_has_its_own_keys

duo's window is one token shorter
    keep.duo:Duo.by_rule
    - newest - self.recent)
    + newest - self.recent + 1)
    keep/test_duo.py::test_definition[0.5-sizes0-None]

duo is billed for first tokens that are out of sight
    keep.duo:Duo.limits
    - - (tokens - seen))
    + - 0)
    bill/test_allocated.py::test_bytes_of_heads_that_stream[30]

kvzap lets go of what scores most
    keep.kvzap:KVzap.choose
    - < math.log
    + > math.log
    keep/test_kvzap.py::test_definition[sizes0-20-3-None]

nvfp4 takes what errs more
    store.float4:Float4.write
    - < self._error
    + > self._error
    store/test_float4.py::test_four_over_six_takes_what_errs_less

a step at once does not see its own token
    fast.fused:Fused.call
    - mask, store.length + 1, received)
    + mask, store.length, received)
    fast/test_fused.py::test_what_is_written_has_the_bits_of_the_format[full]

a compiled step goes on under a hook
    models.stamp:Stamp.same
    - self.hooks.same() and
    + True and
    fast/test_stamp.py::test_a_step_computes_with_what_the_model_is_now[hook on model.norm]
"""
MUTANTS = {}
for entry in TABLE.strip().split("\n\n"):
    name, place, line, other, test = map(str.strip, entry.splitlines())
    MUTANTS[name] = place, line.removeprefix("- "), other.removeprefix("+ "), test


@contextmanager
def mutated(place: str, line: str, other: str):
    """The function `module:Class.method`, or `module:function`, of kvlab with `other` for `line`, wherever it
    is imported."""
    module, _, name = place.partition(":")
    where, (owner, _, method) = importlib.import_module(f"kvlab.{module}"), name.rpartition(".")
    owner = getattr(where, owner) if owner else where
    function = getattr(owner, method)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{module}: {line!r} is there {source.count(line)} times"
    wrapped = "def make(__class__):\n" + textwrap.indent(source.replace(line, other), "    ")
    space: dict = {}
    text = f"from __future__ import annotations\n{wrapped}    return {method}"
    exec(compile(text, module, "exec"), vars(where), space)
    original = function.__code__
    function.__code__ = space["make"](owner).__code__
    try:
        yield
    finally:
        function.__code__ = original


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
