"""The command `python -m course` (see the package's docstring)."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlab import extras

try:
    extras.needs("nbformat", "nbclient", "matplotlib")
except extras.Missing as error:
    sys.exit(f"{error}")

import nbformat

from . import __doc__ as what
from . import answers, editions, quiz, run, text
from .harness import CLONE, COMMAND
from .teaching.check import tally

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("text", help="print a notebook as plain text")
    one.add_argument("notebook", type=Path)
    one = verbs.add_parser("notebook", help="make a notebook from text; outputs stay if no code changed")
    one.add_argument("text", type=Path)
    one.add_argument("notebook", type=Path)
    one = verbs.add_parser("run", help="run notebooks and store their outputs (default: all chapters)")
    one.add_argument("notebooks", type=Path, nargs="*")
    one = verbs.add_parser("try", help="run the learner edition of every chapter, nothing answered")
    one.add_argument("notebooks", type=Path, nargs="*")
    one = verbs.add_parser("lab", help="lay out the learner edition to work in; notebooks there stay")
    one.add_argument("folder", type=Path, nargs="?", default=Path("lab"))
    one = verbs.add_parser("workshop", help="write kvlab-learner.zip and kvlab-instructor.zip")
    one.add_argument("--out", type=Path, default=Path("build/workshop"))
    one = verbs.add_parser("site", help="write the sources of the static site (`make site` builds it)")
    one.add_argument("--out", type=Path, default=Path("build/site"))
    one.add_argument("--report", type=Path, default=Path("results/demo/report.html"))
    one = verbs.add_parser("smollm2", help="measure what the chapters show of SmolLM2")
    one.add_argument("studies", nargs="*")
    one = verbs.add_parser("words", help="store what a real model writes under each method")
    one.add_argument("model", help="smollm2, or a GGUF file of a model that writes code")
    verbs.add_parser("drawings", help="draw the strips and the story into notebooks/drawings")
    one = verbs.add_parser("slides", help="write the slides of every chapter and of the talk")
    one.add_argument("--out", type=Path, default=Path("build/slides"))
    one.add_argument("--pdf", action="store_true", help="print them, too (needs Chromium or Chrome)")
    one = verbs.add_parser("answers", help="tabulate a class's answers to the quiz, and draw them")
    one.add_argument(
        "answers", type=Path, metavar="CSV", help="the class's table, or a folder of saved forms"
    )
    one.add_argument("--out", type=Path, default=Path("answers.png"))
    one.add_argument("--quiz", type=Path, default=quiz.QUIZ, help="where quiz.md is, if not beside kvlab")
    one = verbs.add_parser("board", help="who has solved what, from the folder that KVLAB_BOARD names")
    one.add_argument("folder", type=Path)
    if CLONE:
        one = verbs.add_parser("agenda", help="write the instructor's agendas, or print one")
        one.add_argument("--hours", type=float, help="print the agenda that fills the most of so many hours")
    given = parser.parse_args(arguments)
    try:
        if given.verb == "text":
            print(text.to_text(nbformat.read(given.notebook, as_version=4)), end="")
        elif given.verb == "notebook":
            made = text.to_notebook(given.text.read_text(encoding="utf-8"))
            if given.notebook.exists():
                text.keep_outputs(made, nbformat.read(given.notebook, as_version=4))
            nbformat.write(made, given.notebook)
        elif given.verb == "run":
            problems = run.run(given.notebooks or sorted(NOTEBOOKS.glob("*.ipynb")))
            for problem in problems:
                print(problem, file=sys.stderr)
            return bool(problems)
        elif given.verb == "try":
            paths = given.notebooks or sorted(NOTEBOOKS.glob("*.ipynb"))
            with ThreadPoolExecutor(2) as two:
                problems = [problem for problem in two.map(editions.try_as_learner, paths) if problem]
            print("\n".join(problems) or f"{len(paths)} learner editions run", flush=True)
            return bool(problems)
        elif given.verb == "lab":
            for name in editions.lay_out(sorted(NOTEBOOKS.glob("*.ipynb")), given.folder):
                print(
                    f"{given.folder / name} stays yours; its chapter has changed: delete it for the new one"
                )
        elif given.verb == "slides":
            from . import slides

            print(*slides.write(sorted(NOTEBOOKS.glob("*.ipynb")), given.out, printed=given.pdf), sep="\n")
        elif given.verb == "smollm2":
            from . import smollm2

            smollm2.measure(given.studies)
        elif given.verb == "words":
            from . import asking

            asking.measure(given.model)
        elif given.verb == "drawings":
            from . import moving, strips

            print(*strips.write(editions.DRAWINGS), moving.write(editions.DRAWINGS), sep="\n")
        elif given.verb == "agenda":
            from .instructor import agenda

            if given.hours is None:
                agenda.PAGE.write_text(agenda.page(), encoding="utf-8")
            else:
                name = agenda.fitting(given.hours)
                print(f"the longest plan of {given.hours:g} hours or fewer: {name.lower()}", file=sys.stderr)
                print(agenda.agenda(name, *agenda.read()))
        elif given.verb == "answers":
            print(answers.answers(given.answers, given.out, given.quiz))
        elif given.verb == "board":
            print(tally.table(given.folder))
        elif given.verb == "site":
            from . import site  # latex2mathml: for the project's site, no kit installs it

            print(site.write(given.out, given.report))
        else:
            from .kit import pack

            for path in pack.write(sorted(NOTEBOOKS.glob("*.ipynb")), given.out):
                print(f"{path} ({path.stat().st_size / 1e6:.0f} MB)")
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
