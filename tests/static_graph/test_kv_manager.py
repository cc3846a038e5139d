"""The KV manager against closed formulas, and the totals of QC AI Research (n.d.)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.teaching import pictures
from kvlab.arithmetic import SHAPES
from kvlab.static_graph.kv_manager import KVManager

policies = st.one_of(
    st.sampled_from([("shift", None), ("double", None), ("ring", None)]),
    st.tuples(st.just("compromise"), st.floats(0, 3)),
)


@given(
    policy=policies, length=st.integers(2, 40), steps=st.integers(0, 200), head_dim=st.sampled_from([1, 4, 8])
)
def test_counters_equal_closed_formulas_in_the_single_head_form(policy, length, steps, head_dim):
    (name, extra), rows = policy, length - 1
    manager = KVManager(4, length, head_dim, policy=name, extra=extra)
    for _ in range(steps):
        manager.place()
        manager.commit()
    part = {"shift": 0, "ring": 0, "double": 1}.get(name, extra)
    row = head_dim * 4
    assert manager.reserved_bytes == 4 * 4 * round((1 + part) * rows * head_dim)
    if name == "ring":
        assert manager.copied_bytes == 4 * row * max(0, steps - rows)  # one row, once all slots are taken
    else:
        copies = steps // (int(part * rows + 1e-9) + 1)
        assert manager.copies == copies
        assert manager.copied_bytes == 4 * row * rows * copies


def test_the_figure_shows_the_totals_of_the_document():
    axes = pictures.buffers(SHAPES["Llama-7B"], 2048).axes[0]
    points = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines[::-1]}
    assert points["double"][0] == 2.146435072 and points["compromise 0.5"][0] == 1.609826304
    assert points["shift"] == pytest.approx((1.073217536, 2047 * 524288 / 1e6))
    assert points["double"][1] == pytest.approx(2047 / 2048 * 524288 / 1e6)
    names = axes.get_legend_handles_labels()[1]
    assert len(names) == len(set(names)) == 6
