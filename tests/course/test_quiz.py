"""The quiz says what every wrong answer shows, and a class's table equals a count by hand."""

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
