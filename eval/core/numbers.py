"""Numbers as text: how the value of a metric is printed, in lines and in tables."""

from __future__ import annotations

SHARES = ("acc", "acc_norm", "exact_match", "pass@1")


def is_share(metric: dict) -> bool:
    """Is it a share of right answers (shown in per cent, averaged over tasks)? RULER names it by a length."""
    name = metric["metric"].split(",")[0]
    return metric["higher_is_better"] and (name in SHARES or name.isdecimal())


def spread(row: dict) -> str:
    """A metric's standard error as it is printed beside the value."""
    error = row["stderr"] or 0
    return f"{100 * error:.1f}" if is_share(row) else f"{error:.2g}" if error < 100 else f"{error:.0f}"


def shown(row: dict) -> str:
    """A metric's value as it is printed: shares in per cent with one decimal."""
    if row["value"] is None:
        return "n/a"
    if is_share(row):
        return f"{100 * row['value']:.1f}"
    return f"{row['value']:.3g}" if abs(row["value"]) < 1000 else f"{row['value']:.0f}"
