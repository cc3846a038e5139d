"""What real models wrote is shown as it was stored, and asked of what is there."""

from course import asking as asked
from course.teaching import lease, words


def test_the_stored_rows_are_those_that_the_command_asks():
    formats, keeps = set(asked.FORMATS), set(asked.KEEPS)
    for study, shares, others in (
        ("clause", asked.BUDGETS, {"offload", asked.FIRST}),
        ("code", (0.5,), set()),
    ):
        rows = {row[0] for row in words.stored()[study]["rows"]}
        assert rows == {"full"} | formats | {f"{k}:budget={s}" for k in keeps for s in shares} | others
    assert words.CITY in lease.CITIES
