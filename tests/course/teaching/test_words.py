"""What real models wrote is shown as it was stored, and asked of what is there."""

from __future__ import annotations

from course import words as asked
from course.teaching import lease, words


def test_the_stored_rows_are_those_that_the_command_asks():
    formats, keeps = set(asked.FORMATS), set(asked.KEEPS)
    for study, shares in (("clause", asked.BUDGETS), ("code", (0.5,))):
        rows = {row[0] for row in words.stored()[study]["rows"]}
        assert rows - {"offload"} == {"full"} | formats | {f"{k}:budget={s}" for k in keeps for s in shares}
    assert words.CITY in lease.CITIES
