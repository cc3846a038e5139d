"""A table in the terminal; where it is too wide, its last columns follow below."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Drawn
from rich.text import Text

STYLES = {"▲": "bold", "▼": "dim"}  # of a text with this mark


def printed(head: list[str], body: list[list[str]], console: Console) -> None:
    """Print it: as many columns side by side as there is room for, so that nothing is cropped; the others
    follow below, beside the first one again."""
    names, *columns = zip(head, *body, strict=True)
    unlimited = console.options.update(width=10**4)
    fits = lambda some: Measurement.get(console, unlimited, drawn(some)).maximum <= console.width
    while columns:
        count = len(columns)
        while count > 1 and not fits([names, *columns[:count]]):
            count -= 1
        console.print(drawn([names, *columns[:count]]))
        columns = columns[count:]


def drawn(columns: list[tuple[str, ...]]) -> Drawn:
    """Columns of texts, each with its title first, the first of them words."""
    table = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, (head, *_) in enumerate(columns):
        table.add_column(Text(head), justify="right" if place else "left", no_wrap=True)
    for line in zip(*(texts for _, *texts in columns), strict=True):
        table.add_row(*(Text(text, style=STYLES.get(text[-1:], "")) for text in line))
    return table
