"""One row of `offload.json`: our result, how it was made, and the published number."""

from __future__ import annotations

MEASURED, MODELLED, SIMULATED = "measured", "modelled", "simulated"


def row(
    experiment: str,
    system: str,
    value: float,
    unit: str,
    kind: str,
    tokens: int | None = None,
    published=None,
) -> dict:
    """kind: measured (this machine, real data), modelled (wall time here over a modelled link) or simulated
    (no data; computation from a roofline or from measured parts). published: the source's number for the
    same quantity, on its own model and hardware, or None."""
    return {
        "experiment": experiment, "system": system, "tokens": tokens, "value": value, "unit": unit,
        "kind": kind, "published": published,
    }  # fmt: skip
