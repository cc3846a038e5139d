"""Static graph: a graph of fixed shapes attends to S tokens: S - 1 rows of a buffer, and the new one."""


def window(appended: int, length: int) -> list[int]:
    """Position held in every row of the S - 1 after so many appends: the newest last, -1 for padding."""
    rows = [-1] * (length - 1)
    for position in range(appended):
        rows = [*rows[1:], position]
    return rows


def ring(appended: int, length: int) -> list[int]:
    """The same where token t is written into row t mod (S - 1), and nothing ever moves."""
    rows = [-1] * (length - 1)
    for position in range(appended):
        rows[position % (length - 1)] = position
    return rows
