"""The quiz says what every wrong answer shows, and a class's table equals a count by hand."""

from __future__ import annotations

import pytest

from course import answers, quiz
from course.__main__ import main
from course.instructor.agenda import read as chapters

CLASS = """name,when,q1,q2,q10
Ada,pre,a,a,a
Bo,pre,a,b,a
Cy,pre,c,,b
Ada,post,c,b,d
Bo,post,a,b,d
Cy,post,c,a,b
Di,post,d,a,d
"""


@pytest.fixture
def csv_file(tmp_path):
    def write(text, **options):
        path = tmp_path / "class.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode(**options))
        return path

    return write


def tabulate(path):
    return answers.tabulate(answers.read(path, quiz.questions()), quiz.questions())


def test_there_are_ten_questions_and_every_wrong_answer_shows_a_misconception():
    found = quiz.questions()
    assert [question.number for question in found] == list(range(1, 11))
    numbers = chapters()[0]
    for question in found:
        assert set(question.choices) == set("abcd") and question.right in question.choices
        assert set(question.shows) == set("abcd") - {question.right}
        assert all(len(shown) > 20 for shown in question.shows.values())
        assert question.chapter in numbers and question.text.endswith("?")
    assert len({shown for question in found for shown in question.shows.values()}) == 30


def test_the_sheet_for_learners_is_the_quiz_without_its_answers():
    sheet = quiz.sheet()
    assert quiz.SHEET.read_text() == sheet, "make it again: python -m course.quiz"
    assert "Right" not in sheet and "chapter" not in sheet
    for question in quiz.questions():
        assert question.text in sheet and not any(shown in sheet for shown in question.shows.values())


def test_the_form_asks_the_same_and_saves_what_the_command_reads(tmp_path, browser):
    assert quiz.FORM.read_text() == quiz.form(), "make it again: python -m course.quiz"
    assert not any(shown in quiz.form() for one in quiz.questions() for shown in one.shows.values())
    page = tmp_path / "form.html"
    page.write_text(quiz.form())
    browser.open(page.as_uri())
    browser.run("""(() => {
      document.querySelector("[name=name]").value = 'Zoë "Z"';
      for (const [name, value] of [["when", "pre"], ["q1", "c"], ["q10", "a"]])
        document.querySelector(`[name=${name}][value=${value}]`).checked = true;
      const real = URL.createObjectURL;
      URL.createObjectURL = (blob) => { window.saved = blob.text(); return real(blob); };
      document.querySelector("button").click();
    })()""")
    (tmp_path / "saved.csv").write_text(browser.run("window.saved"))
    (sheet,) = answers.read_all(tmp_path, quiz.questions())
    assert (sheet["when"], sheet["q1"], sheet["q2"], sheet["q10"]) == ("pre", "c", "", "a")
    assert sheet["name"].startswith("Zoë") and not browser.errors
    assert browser.run("document.getElementById('said').textContent") == "Saved: quiz-Zoë_Z-pre.csv"


def test_a_folder_of_saved_forms_is_one_class(tmp_path):
    with pytest.raises(ValueError, match="no file ends in"):
        answers.read_all(tmp_path, quiz.questions())
    for name, who in (("a", "Ada"), ("b", "Bo")):
        (tmp_path / f"{name}.csv").write_text(f"name,when,q1\n{who},pre,c\n")
    assert [sheet["name"] for sheet in answers.read_all(tmp_path, quiz.questions())] == ["Ada", "Bo"]
    (tmp_path / "c.csv").write_text("name,when,q1\nBo,pre,a\n")
    with pytest.raises(ValueError, match="Bo has answered 'pre' in two files"):
        answers.read_all(tmp_path, quiz.questions())


def test_the_table_equals_a_count_by_hand(csv_file):
    one, two, ten = tabulate(csv_file(CLASS))
    assert (one.given, one.right) == ((3, 4), (1, 2)) and one.wrong == (("a", 2), ("a", 1))
    assert (two.given, two.right, two.wrong) == (
        (2, 4),
        (1, 2),
        (("a", 1), ("a", 2)),
    )  # Cy left it out before
    assert (ten.given, ten.right, ten.wrong) == ((3, 4), (0, 3), (("a", 2), ("b", 1)))
    assert one.share(0) == 1 / 3 and ten.share(1) == 0.75


def test_the_command_prints_the_table_and_draws_the_picture(csv_file, tmp_path, capsys):
    out = tmp_path / "new folder" / "answers.png"
    assert main(["answers", str(csv_file(CLASS)), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert (
        "| 1. Without a cache | 1 of 3 | 2 of 4 | a (2 before, 1 after): believes that a model remembers"
        in told
    )
    (ten,) = [
        line for line in told.splitlines() if line.startswith("| 10. A fair score | 0 of 3 | 3 of 4 | ")
    ]
    assert "| a (2 before): " in ten and " b (1 after): doubts the length" in ten
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_class_that_was_asked_once_is_tabulated_too(csv_file):
    before = "".join(line for line in CLASS.splitlines(keepends=True) if "post" not in line)
    (one, *_) = tabulate(csv_file(before))
    assert (one.given, one.wrong, one.share(1)) == ((3, 0), (("a", 2), ("", 0)), None)
    assert "| 1 of 3 | – | a (2 before)" in answers.table([one])
    answers.picture([one])


def test_spreadsheets_write_semicolons_capitals_and_a_mark_at_the_start(csv_file):
    path = csv_file("Name;When;Q1\nZoë; PRE ;A\n", encoding="utf-8-sig")
    assert answers.read(path, quiz.questions()) == [{"name": "Zoë", "when": "pre", "q1": "a"}]


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "the first line must name the columns"),
        ("name,when,q1\n", "no line with answers"),
        ("name,q1\nAda,a\n", "the first line must name the columns"),
        ("name,when,q11\nAda,pre,a\n", "the first line must name the columns"),
        ("name,when,q1,mark\nAda,pre,a,1\n", "column 'mark' is none of name, when, q1 to q10"),
        ("name,when,q1,q1\nAda,pre,a,b\n", "a column is there twice"),
        ("name,when,q1\nAda,later,a\n", "line 2: when is 'later', expected pre or post"),
        ("name,when,q1\nAda,pre,a\nBo,pre,e\n", "line 3: q1 is 'e', expected a, b, c, d or nothing"),
        (
            "name,when,q1\nAda,pre,a\n,pre,a\n,pre,b\nAda,before,b\n",
            "line 5: Ada has answered 'pre' already, in line 2",
        ),
        ("name,when,q1\nAda,pre,a,b\n", "line 2: more fields than columns"),
        (b"name,when,q1\nZo\xeb,pre,a\n", "not text in UTF-8; save the table as CSV in UTF-8"),
        (b"PK\x03\x04\x00\x00", "the first line must name the columns"),
    ],
)
def test_a_bad_file_is_one_line(csv_file, capsys, text, told):
    assert main(["answers", str(csv_file(text))]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line and "class.csv" in line


def test_spreadsheets_write_tabs(csv_file):
    path = csv_file("name\twhen\tq1\nAda, Bo\tpre\ta\n")
    assert answers.read(path, quiz.questions()) == [{"name": "Ada, Bo", "when": "pre", "q1": "a"}]


@pytest.mark.parametrize("out, told", [("b.xyz", ".png, .pdf, .svg"), ("/proc/none/a.png", "another --out")])
def test_a_picture_that_cannot_be_written_is_one_line(csv_file, capsys, out, told):
    assert main(["answers", str(csv_file(CLASS)), "--out", out]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line and line.startswith(out)


def test_without_the_quiz_it_says_where_that_is(csv_file, tmp_path, capsys):
    assert main(["answers", str(csv_file(CLASS)), "--quiz", str(tmp_path / "quiz.md")]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--quiz" in line and "zip for instructors" in line
