"""The moving picture says what is true, plays by itself, obeys its controls, and can be a still."""

from __future__ import annotations

import json

import pytest

from course import drawings, moving
from course.teaching import contract, lease

STORY = drawings.FOLDER / "story.svg"
AT = "Number(document.querySelector('input').value)"


def test_its_scenes_say_what_the_bill_and_the_model_say():
    story, found = moving.story(), moving.heard()
    said = [sentence for _, sentence in story.scenes]
    name = lease.NAMES[0]
    assert [end for end, _ in story.scenes] == sorted(moving.ENDS) and moving.ENDS[-1] == moving.LENGTH
    fits = contract.bill("full").lines[0].tokens
    assert f"{contract.TOKENS:,} tokens" in said[1] and f"After {fits:,} tokens" in said[3]
    assert fits < contract.TOKENS and len(found.kept) == moving.BOXES // 5 and found.asked not in found.kept
    assert dict(found.words)[name] == 0 and f"name {name} is left in none of its {found.heads}" in said[5]
    assert found.full == f"{name}." and found.few.split()[-1] not in lease.written(lease.DOG.format(name))


def test_its_still_is_its_last_second():
    """Whatever has an end that is not seen is not seen in the file either."""
    drawn = moving.story().svg()
    frames = [json.loads(text.split("'")[0]) for text in drawn.split("data-frames='")[1:]]
    assert len(frames) > moving.BOXES
    assert all(one == sorted(one, key=lambda frame: frame[0]) for one in frames)
    assert all(0 <= frame[0] <= moving.LENGTH for one in frames for frame in one)
    assert drawn.count('opacity="0"') == sum(one[-1][1] == 0 for one in frames) > 90


@pytest.fixture
def shown(browser):
    """Opens the file, where motion is welcome or is not."""

    def show(calm: bool = False):
        browser.size(760, 520)
        browser.open(STORY.as_uri(), ready="document.querySelector('input')", calm=calm)
        return browser

    yield show
    browser.size(1280, 900)


def test_it_plays_by_itself_and_pauses(shown):
    browser = shown()
    browser._wait(lambda: browser.run(f"0.2 < {AT} && {AT} < 60"))
    assert browser.run("document.querySelector('button').textContent") == "Pause"
    browser.run("document.querySelector('button').click()")
    second = browser.run(AT)
    assert browser.run(f"new Promise(done => setTimeout(() => done({AT}), 300))") == second
    assert browser.errors == []
