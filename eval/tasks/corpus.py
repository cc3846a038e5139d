"""The documents that the workshop models learned from and tasks ask about: facts to recall among prose.

Every function draws from the `random.Random` it is given and from nothing else, so a seed fixes the
text.  The wording `met` and the lists `EVAL_NAMES` and `EVAL_PLACES` are for evaluation only.

A fact ties a key ("brown dog") to a value ("Otis").  Where the value directly follows the key the
wording is *adjacent* (the easiest to learn: find the key, copy the next token); where the same words separate
them in every fact ("the red key is in the barn") it is *separated*.

The rows of `recall`, `needle`, `chain` and `recall_many` in `data/` were written once, by functions that are
in git's history (eval/tasks/make.py at 0d543b90).

    >>> import random
    >>> d = recall(random.Random(5), facts=2)
    >>> print(d.text + d.answer)            # the text ends right before the answer
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from .words import ANIMALS, COLOURS, NAMES, PLACES, THINGS


@dataclass(frozen=True)
class Document:
    """Facts, then one or more questions; the last question is the one that is asked.

    `kind` is the wording; `context` is the part with the facts; `questions` are pairs (question, answer), an
    answer is one word with its leading space; `choices` are all values that the document states.
    """

    kind: str
    context: str
    questions: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.questions[-1][1]

    @property
    def text(self) -> str:
        """The prompt: everything up to, and not including, the last answer."""
        earlier = "".join(f"{question}{answer}." for question, answer in self.questions[:-1])
        return self.context + earlier + self.questions[-1][0]


@dataclass(frozen=True)
class Wording:
    """How a fact is stated and asked for; `value` says what is looked up, a name or a place."""

    value: str
    facts: tuple[str, ...]
    question: str


WORDINGS = {
    "named": Wording(
        "name",
        (
            "The {key} {value} slept by the {place}.",
            "We saw the {key} {value} near the {place}.",
            "Then the {key} {value} ran to the {place}.",
            "The {key} {value} lives in the {place}.",
            "The {key} {value} likes the {place}.",
        ),
        "\nQuestion: the {key}",
    ),
    "called": Wording(
        "name",
        ("The {key} is called {value}.", "In the {place} was a {key} called {value}."),
        "\nQuestion: the {key} is called",
    ),
    "in": Wording("place", ("The {key} is in the {value}.",), "\nQuestion: the {key} is in the"),
    "put": Wording(
        "place",
        ("{name} put the {key} in the {value}.", "{name} found the {key} in the {value}."),
        "\nQuestion: the {key} is in the",
    ),
}
EVAL_WORDINGS = {
    "met": Wording(
        "name",
        ("On the way home I met the {key} {value}.",),
        "\nQuestion: on the way home I met the {key}",
    )
}


def keys(rng: random.Random, count: int, nouns: list[str]) -> list[str]:
    """`count` different two-word keys such as "brown dog"; the single words may come back."""
    pairs = rng.sample(range(len(COLOURS) * len(nouns)), count)
    return [f"{COLOURS[p % len(COLOURS)]} {nouns[p // len(COLOURS)]}" for p in pairs]


def scatter(rng: random.Random, facts: list[str], filler: list[str]) -> str:
    """The facts in their order, at random places between the filler sentences."""
    spots = set(rng.sample(range(len(facts) + len(filler)), len(facts)))
    fact, fill = iter(facts), iter(filler)
    parts = range(len(facts) + len(filler))
    return " ".join(next(fact) if i in spots else next(fill) for i in parts)


def recall(
    rng: random.Random,
    facts: int = 8,
    wording: str = "named",
    names: list[str] = NAMES,
    places: list[str] = PLACES,
    questions: int = 1,
    filler: Iterable[str] = (),
) -> Document:
    """`facts` statements with different keys and different values, and `questions` about them.

    `wording` is a key of `WORDINGS` or `EVAL_WORDINGS`; `filler` are sentences to put between them.
    """
    style = WORDINGS.get(wording) or EVAL_WORDINGS[wording]
    named = style.value == "name"
    chosen = keys(rng, facts, ANIMALS if named else THINGS)
    values = rng.sample(names if named else places, facts)
    # Half of the documents keep to one sentence form, half mix them all.
    forms = style.facts if rng.random() < 0.5 else (rng.choice(style.facts),)
    stated = [
        rng.choice(forms).format(key=k, value=v, place=rng.choice(places), name=rng.choice(names))
        for k, v in zip(chosen, values)
    ]
    asked = rng.sample(range(facts), min(questions, facts))
    pairs = tuple((style.question.format(key=chosen[i]), " " + values[i]) for i in asked)
    return Document(wording, scatter(rng, stated, list(filler)), pairs, tuple(values))


WHEN = """In the morning|After lunch|Before the sun went down|On a cold day|Late in the evening|
When the rain stopped|At noon|During the long summer|One day|All through the winter|As usual|
On Sunday|A little later|For a while|At the end of the week|Early in spring""".replace("\n", "")
WHO = """the baker|an old man|the teacher|my aunt|the children|a farmer|the postman|our neighbour|
two sailors|the doctor|a tired traveller|the gardener|my little sister|the cook|a young woman|
the people next door|her grandmother|the captain|a shy boy|the painter""".replace("\n", "")
DID = """opened the window|counted the clouds|waited for the bus|sang a quiet song|baked some bread|
looked for a warm place|told a long story|washed the dishes|read the news|went home without a word|
laughed at the joke|carried water up the hill|fixed the broken chair|listened to the wind|
drank a cup of tea|planted a few seeds|wrote down the numbers|sat by the fire|swept the floor|
talked about the weather|cut the wood|watched the birds|made soup|fell asleep""".replace("\n", "")


def prose(rng: random.Random, sentences: int) -> list[str]:
    """Plain sentences of a small grammar: filler in which none of the keys is stated."""
    when, who, did = WHEN.split("|"), WHO.split("|"), DID.split("|")
    made = []
    for _ in range(sentences):
        first, second = rng.sample(did, 2)
        person = rng.choice(who)
        made.append(
            rng.choice(
                (
                    f"{rng.choice(when)} {person} {first} and {second}.",
                    f"{rng.choice(when)} {person} {first}.",
                    f"{person[0].upper() + person[1:]} {first} while {rng.choice(who)} {second}.",
                )
            )
        )
    return made
