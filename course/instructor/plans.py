"""Plans: what three hours, half a day, a day or two evenings hold, and what to leave out when late."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chapter:
    """What is done of a chapter.

    exercises: numbers of those done in the room. home: sections that are left out. late: what to leave out
    when late, in this order: a section's heading, or `exercise 2`. rest: the section behind which all stand
    up for a minute.
    """

    number: int
    exercises: tuple[int, ...] = ()
    home: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    rest: str = ""


@dataclass(frozen=True)
class Pause:
    """A break, or other minutes that no chapter fills."""

    what: str
    minutes: int


DOCTOR = Pause("arrivals; `sh start.sh --check` on every machine; the quiz, first time", 20)
CHECK_ALL = Pause("arrivals; `sh start.sh --all --check` on every machine", 15)  # without the quiz
DOCTOR_ALL = replace(DOCTOR, what=DOCTOR.what.replace("--check", "--all --check"))  # where methods are scored
AGAIN = Pause("the quiz, second time; its picture beside the first; what next", 15)
BREAK, STRETCH, STAND = Pause("break", 15), Pause("stretch", 4), Pause("all stand up", 1)

START = Chapter(0, home=("How to read timings", "Exercise"), late=("Three questions",))
SHORT_START = replace(
    START, home=(*START.home, "Three questions", "The same on a model people know"), late=()
)
BYTES = Chapter(2, home=("What it costs",), late=("How many bytes",))
LOOP = Chapter(
    1,
    home=("The same answer?", "What the cache holds", "What it costs"),
    late=("The same on a model people know",),
)
LINK = Chapter(  # as much of chapter 6 as chapter 7 needs
    6,
    home=(
        "A cache that does not fit",
        "How it works",
        "Your cache moves to the host",
        "The same on a model people know",
        "What it costs",
        "Common mistakes",
        "Key points",
    ),
)
REHEARSAL = Chapter(
    7,
    (1,),
    home=("A few columns", "What it costs"),
    late=("exercise 1",),
    rest="How it works",
)

FEW_BYTES = Chapter(
    2,
    home=(*BYTES.home, "How many bytes", "What limits one step", "The same on a model people know"),
)
KEPT = Chapter(5, home=("The pain", "What it costs"))

STEP = Chapter(  # learners write the step that decodes the model, and see their cache answer
    2,
    (1,),
    home=("What it costs",),
    late=("What limits one step", "How many bytes"),
)
SHORT_STEP = replace(
    STEP,
    home=(*STEP.home, "What limits one step", "How many bytes", "The same on a model people know"),
    late=(),
)
RULE = Chapter(5, (1,), home=("The pain", "What it costs"))  # learners write what stays
DECIDE = Chapter(  # the end of chapter 9: the reader's own guess, and the decision
    9,
    home=(
        "The question comes later",
        "Predict",
        "KeyDiff: keep what is unlike the rest",
        "KVzip: read it again",
        "Quest: bounds instead of keys",
        "Caches that are trained or written",
        "Key points",
    ),
)

AGENDAS = {  # name: sessions of (starts at, ends at by the latest, items)
    "Three hours": [
        (
            "9:00",
            "12:00",
            (
                Pause(
                    "arrivals; everyone opens `page.html`, in which a model runs without any installation; "
                    "meanwhile `sh start.sh --check` on every machine",
                    20,
                ),
                SHORT_START,
                FEW_BYTES,
                BREAK,
                KEPT,
                Pause("the talk, `slides/talk.html`: what was done, and what else there is", 20),
                Pause("what next: chapters 1, 4 and 6 at home", 3),
            ),
        )
    ],
    "Half a day": [
        (
            "9:00",
            "13:30",
            (
                DOCTOR,
                replace(START, late=(), home=(*START.home, "Three questions")),
                SHORT_STEP,
                BREAK,
                RULE,
                STRETCH,
                DECIDE,
                AGAIN,
            ),
        )
    ],
    "One day": [
        (
            "9:00",
            "18:00",
            (
                DOCTOR_ALL,
                replace(START, home=(*START.home, "Three questions"), late=()),
                LOOP,
                BREAK,
                BYTES,
                STRETCH,
                Chapter(
                    4,
                    (1,),
                    home=("What it costs", "The bill so far"),
                    late=("exercise 1",),
                ),
                Pause("lunch", 45),
                KEPT,
                STRETCH,
                Chapter(
                    6,
                    home=("A cache that does not fit", "What it costs", "Common mistakes", "The bill so far"),
                    late=("How it works",),
                ),
                BREAK,
                REHEARSAL,
                STRETCH,
                Chapter(
                    8,
                    (1,),  # a method of one's own: the chapter's heart
                    home=("The pain", "What it costs", "Clause 17", "Your own document"),
                ),
                AGAIN,
            ),
        )
    ],
    "Two evenings": [
        (
            "18:00",
            "21:30",
            (
                DOCTOR,
                START,
                LOOP,
                BREAK,
                STEP,
            ),
        ),
        (
            "18:00",
            "21:30",
            (
                Pause("what the exercises at home have shown", 10),
                RULE,
                BREAK,
                LINK,
                STRETCH,
                REHEARSAL,
                DECIDE,
                AGAIN,
            ),
        ),
    ],
    "A third evening": [
        (
            "18:00",
            "21:30",
            (
                CHECK_ALL,
                Chapter(8, (1,), home=("What it costs",)),
                BREAK,
                Chapter(
                    9,
                    (2,),
                    late=("Caches that are trained or written",),
                    rest="KVzip: read it again",
                ),
            ),
        ),
    ],
}
