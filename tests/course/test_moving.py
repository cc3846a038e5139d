"""The moving picture says what is true, plays by itself, obeys its controls, and can be a still."""

import json

from course import moving
from course.teaching import contract, lease


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
