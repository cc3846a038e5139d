"""What a learner predicted and answered: kept, counted, and shared in a folder."""

from course.teaching import check


def test_a_prediction_is_kept_and_answered_later(capsys, monkeypatch):
    monkeypatch.setattr("course.teaching.check.tally.CHOSEN", chosen := {})
    monkeypatch.setattr("course.teaching.check.tally.FORESEEN", foreseen := {})
    check.reveal("2.1")
    assert capsys.readouterr().out.startswith("The answer: 3. everything") and not foreseen
    check.question("2.1", 3)  # too late
    assert "is not counted" in capsys.readouterr().out and chosen.pop("2.1") == ""
    check.question("2.1", 1)
    assert capsys.readouterr().out == "kept: you say 1. only the attention scores. A later cell answers.\n"
    check.reveal("2.1")
    assert capsys.readouterr().out.startswith("You chose 1.") and foreseen == {"2.1": False}
    check.question("2.1", "3")  # its answer is known by now
    assert "is not counted" in capsys.readouterr().out
    check.reveal("2.1")
    assert capsys.readouterr().out.startswith("You chose 1.") and foreseen == {"2.1": False}


def test_the_board_is_shared_in_a_folder(capsys, monkeypatch, tmp_path):
    from course.__main__ import main
    from course.teaching.check import tally as board

    monkeypatch.setattr(board, "TRIED", {})
    monkeypatch.setenv("KVLAB_BOARD", str(tmp_path))
    monkeypatch.setenv("KVLAB_NAME", "Ada / 1")
    check.growth("c")
    check.fits("a")
    check.board()
    assert "still open: fits" in capsys.readouterr().out
    board.TRIED.clear()  # another notebook
    check.fits("a")
    check.growth(...)
    capsys.readouterr()
    (tmp_path / "z.json").write_text("{")
    assert main(["board", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Ada / 1 ") and lines[1].endswith("fits") and "cannot be read" in lines[2]
    monkeypatch.setenv("KVLAB_BOARD", str(tmp_path / "gone"))
    check.growth("c")
    assert "the shared board was not updated" in capsys.readouterr().out
