"""The quiz: ten questions for before and after, and the misconception that each wrong answer shows.

    python -m course.quiz

reads course/instructor/quiz.md and writes two files beside it, the questions without the answers: sheet.md to
print, and form.html, which saves a learner's letters as a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

QUIZ = Path(__file__).resolve().parent / "instructor" / "quiz.md"
SHEET = QUIZ.with_name("sheet.md")
FORM = QUIZ.with_name("form.html")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ten questions</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root {{ color-scheme: light dark }} body {{ font: 1.05rem/1.5 system-ui, sans-serif; max-width: 42rem;
margin: 2rem auto; padding: 0 1rem }} fieldset {{ margin: 1rem 0 }} label {{ display: block }}
button {{ font: inherit; padding: .4rem 1rem }}</style></head><body>
<h1>Ten questions</h1>
<p>Choose one answer each, and leave out what you do not know. <b>Save</b> writes a small file; give it to
your instructor.</p>
<form id="form"><label>Name or sign <input name="name" required maxlength="40"></label>
<fieldset><legend>When</legend>
<label><input type="radio" name="when" value="pre" required> before the course</label>
<label><input type="radio" name="when" value="post"> after it</label></fieldset>
{questions}
<button>Save</button> <span id="said" role="status"></span></form>
<script>
document.getElementById("form").addEventListener("submit", (event) => {{
  event.preventDefault();
  const given = new FormData(event.target), columns = {columns};
  const name = given.get("name").replace(/["\\r\\n]/g, " ").trim();
  const row = columns.map((column) => (column === "name" ? `"${{name}}"` : given.get(column) || ""));
  const link = document.createElement("a");
  const lines = [columns, row].map((line) => line.join(",") + "\\n");
  link.href = URL.createObjectURL(new Blob(lines, {{ type: "text/csv" }}));
  link.download = `quiz-${{name.replace(/[^\\p{{L}}\\p{{N}}]+/gu, "_")}}-${{given.get("when")}}.csv`;
  link.click();
  document.getElementById("said").textContent = `Saved: ${{link.download}}`;
}});
</script></body></html>
"""


@dataclass(frozen=True)
class Question:
    """One question. choices: letter -> text. shows: letter of a wrong answer -> the misconception in it."""

    number: int
    title: str
    chapter: int
    text: str
    choices: dict[str, str]
    right: str
    shows: dict[str, str]


def questions(path: Path = QUIZ) -> list[Question]:
    """The questions of quiz.md. ValueError where it is not there: no wheel holds it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(
            f"no quiz at {path}: say --quiz and where quiz.md is (it comes with the zip for instructors)"
        ) from None
    found = []
    for part in re.split(r"(?m)^## ", text)[1:]:
        number, title, chapter = re.match(r"(\d+)\. (.+) \(chapter (\d+)\)", part).groups()
        asked, answer = part.split("\nRight: ")
        body = asked.partition("\n")[2]
        found.append(
            Question(
                number=int(number),
                title=title,
                chapter=int(chapter),
                text=" ".join(re.split(r"(?m)^- ", body)[0].split()),
                choices=dict(re.findall(r"(?m)^- ([a-d])\. (.+)$", body)),
                right=answer[0],
                shows=dict(re.findall(r"(?m)^- ([a-d]): (.+)$", answer)),
            )
        )
    return found


def sheet() -> str:
    """The questions as learners get them: one page of Markdown, no answers, no chapters."""
    parts = [
        "# Ten questions\n\nName or sign: ____________   before / after\n",
        "One letter each; leave out what you do not know.\n",
    ]
    for question in questions():
        choices = "\n".join(f"- {letter}. {text}" for letter, text in question.choices.items())
        parts.append(f"**{question.number}.** {question.text}\n\n{choices}\n")
    return "\n".join(parts)


def form() -> str:
    """The questions as one HTML page, which works without a network and saves the letters as a CSV file."""
    asked = questions()
    parts = []
    for one in asked:
        choices = "".join(
            f'<label><input type="radio" name="q{one.number}" value="{letter}"> {escape(text)}</label>\n'
            for letter, text in one.choices.items()
        )
        parts.append(f"<fieldset><legend>{one.number}. {escape(one.text)}</legend>\n{choices}</fieldset>")
    columns = ["name", "when", *(f"q{one.number}" for one in asked)]
    return PAGE.format(questions="\n".join(parts), columns=columns)


if __name__ == "__main__":
    SHEET.write_text(sheet(), encoding="utf-8")
    FORM.write_text(form(), encoding="utf-8")
