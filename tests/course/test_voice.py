"""The chapters speak to one person, in whole sentences; and what is counted is counted rightly."""

from pathlib import Path

import pytest

from course.voice import LEAST_ADDRESS, MOST_SHORT, listen, voice

CHAPTERS = sorted(Path("notebooks").glob("0*.ipynb"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_speaks_in_whole_sentences_to_one_person(path):
    heard = voice(path)
    assert len(heard.sentences) >= 30
    assert heard.short <= MOST_SHORT, f"{heard.short:.0%} of the sentences have eight words or fewer"
    assert heard.per_hundred >= LEAST_ADDRESS, f"{heard.per_hundred:.2f} you and we per hundred words"


def test_telegrams_and_address_are_counted():
    heard = listen(
        "You see the cache grow. It ends. Here we stop and look at what your model has kept so far."
    )
    assert len(heard.sentences) == 3
    assert heard.short == pytest.approx(2 / 3)
    assert heard.address == 3 and heard.words == 20


@pytest.mark.parametrize("text", [
    "# A heading. With two. Sentences.",
    "| a. | b. |\n|---|---|\n| c. | d. |",
    "- one. two. three.",
    "1. one. two.",
    "$$a. b.$$",
    "```python\nx. y.\n```",
    "<details><summary>a.</summary>Short. Very.</details>",
    "![A picture. Two.](a.svg)",
])  # fmt: skip
def test_what_is_no_prose_is_not_counted(text):
    assert listen(text).sentences == ()


def test_an_abbreviation_ends_no_sentence():
    said = listen(
        "Xiao et al. (2023) found sinks, e.g. the first token, in *a note* (n.d.) that `we` do not cite."
    )
    assert len(said.sentences) == 1
