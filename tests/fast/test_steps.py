"""Steps that compiled code takes as a whole hold what the definitions say."""

import pytest
from reference.driven import STEPS, Driven, check, keep_all
from reference.test_keep import OTHERS, by_h2o, by_sinks, by_tova

from kvlab.fast import Fused

STEPWISE = {  # budgets that no power of two divides
    **OTHERS,
    "h2o:budget=11,recent=0.3": by_h2o(11, 0.3),
    "h2o:budget=0.13,recent=0": by_h2o(0.13, 0),
    "tova:budget=0.3": by_tova(0.3),
    "sinks:budget=3,sinks=4": by_sinks(3, 4),
    "full": keep_all,
}


@pytest.mark.parametrize("sizes", [(33, 7), (31,)], ids=["padded", "one row"])
@pytest.mark.parametrize("spec", STEPWISE)
def test_steps_that_go_in_one_call(spec, sizes, monkeypatch):
    """The kernel appends, attends and says what tokens received; what goes is closed up in its buffer."""
    went, call = [], Fused.call
    monkeypatch.setattr(Fused, "call", lambda *args: went.append(call(*args)) or went[-1])
    run = Driven(spec, sizes, head_dim=32, seed=3, noted=False).run()
    assert sum(out is not None for out in went) >= STEPS - 4
    check(run, STEPWISE[spec])
