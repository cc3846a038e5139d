"""The quiz: ten questions for before and after, and the misconception that each wrong answer shows.

    python -m course.quiz

reads course/instructor/quiz.md and writes sheet.md beside it, the questions without the answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

QUIZ = Path(__file__).resolve().parent / "instructor" / "quiz.md"
SHEET = QUIZ.with_name("sheet.md")


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
            f"no quiz at {path}: say --quiz and where quiz.md lies (it comes with the zip for instructors)"
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


if __name__ == "__main__":
    SHEET.write_text(sheet(), encoding="utf-8")
