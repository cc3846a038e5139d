"""One row of `offload.json`: what was found, how, and what was published beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

MEASURED, MODELLED, SIMULATED = "measured", "modelled", "simulated"


@dataclass(frozen=True)
class Row:
    """kind: measured (this machine, real data), modelled (wall time here over a modelled link) or simulated
    (no data; computation from a roofline or from measured parts). published: the source's number for the
    same quantity, on its own model and hardware, or None."""

    experiment: str
    system: str
    value: float
    unit: str
    kind: str
    tokens: int | None = None
    published: float | None = None

    def beside(self, published: float | None) -> Row:
        """The same row with a published number."""
        return replace(self, published=published)

    def json(self) -> dict:
        """As it stands in the file."""
        order = ("experiment", "system", "tokens", "value", "unit", "kind", "published")
        found = asdict(self)
        return {name: found[name] for name in order}
