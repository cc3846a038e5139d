"""`compare`: the harness in one call gives what the command line gives, for methods entered here too."""

import pytest

import kvlab
from eval.report import compare
from kvlab.keep import Keep


class Newest(Keep):
    """Keep the newest tokens."""

    def score(self, layer):
        return layer.slot_positions.float()


@pytest.fixture
def newest():
    @kvlab.method("newest")
    def _(budget=0.2):
        """The newest tokens stay."""
        return {"keep": Newest(budget)}

    yield "newest:budget=12"
    del kvlab.METHODS["newest"]


def test_a_board_holds_what_was_asked(newest, tmp_path, capfd):
    methods = ["full", "int8", newest]
    board = compare.compare(methods, tasks=("recall",), limit=3, out=tmp_path)
    assert set(board.methods) == set(methods) and board.tasks == ["recall"]
    assert all(board.entries[method, "recall"].n == 3 for method in methods)
    assert board.mean["full"][0] >= board.mean[newest][0]
    assert board.bytes["full"]["device_bytes"] == 1 > board.bytes[newest]["device_bytes"]
    assert capfd.readouterr() == ("", "")  # nothing is printed
    again = compare.compare(["int8"], tasks=("recall",), limit=3, out=tmp_path)
    assert again.methods == ["int8"]  # what else the folder holds is left out
    compare.print_board(board)
    table = capfd.readouterr().out.splitlines()
    assert table[0] == "protocol question-inside, eviction every-step"
    assert len(table) == 5 and all(line.startswith(m) for line, m in zip(table[2:], board.methods))
    picture = compare.pareto(board)
    assert {"full", "int8", newest} <= {text.get_text() for text in picture.axes[0].texts}
