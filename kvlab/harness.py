"""The harness and the course from kvlab: packages above it, found when they are first used."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from .extras import needs
from .parameters import shown


def beside(package: str, module: str):
    """A module of eval or course: kvlab_eval's if kvlab is installed, the one beside it in a checkout."""
    root = Path(__file__).resolve().parents[1]
    name = package if (root / "eval" / "core" / "results.py").is_file() else f"kvlab_{package}"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(f"{name}.{module}")


def results(where):
    """Every number of a folder that `python -m eval` filled as a tidy `pandas.DataFrame`: a row for each
    method, task, protocol and other setting, and for speed also each context.

    where: the folder, or an address such as "s3://BUCKET/NAME". Columns: task, method, curve (the method
    without its budget), budget, protocol, limit, dtype, model, metric, score, stderr, n, bytes (held, device
    and host), context, ms (per token), and the number's provenance. Raises ValueError if there are no
    results, or no pandas.
    """
    if not isinstance(where, str) and not hasattr(where, "__fspath__"):
        raise TypeError(f"where: expected a folder or an address, got {shown(where)}")
    needs("pandas")
    return beside("eval", "report.frame").results(where)
