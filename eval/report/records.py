"""Rows: every stored accuracy as one flat row with its provenance, for JSON, CSV and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas
from pyarrow import ArrowException

from kvlab.spec import parse

from ..core.errors import Problem, describe
from ..core.files import write_file
from .statistics import beats, differs, mcnemar

COUNTED = ("contexts", "prefilled_tokens", "prefill_seconds")
ASKED = ("num_fewshot", "limit", "dtype", "evict", "metadata", "gen_kwargs")  # of a configuration
NAMES = ("device_bytes", "host_bytes", "moved_bytes")


@contextmanager
def of_our_schema(where: str | Path) -> Iterator[None]:
    """Problem where cells that are read meanwhile are of another schema."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ArrowException) as error:
        raise Problem(f"{where}: it holds cells of another schema ({describe(error)[0]})") from error


def curve_of(method: str) -> tuple[str, float | None]:
    """(a spec without its budget, its budget or None): methods of one curve share the first."""
    try:
        spec = parse(method)
    except ValueError:  # a method that is not known here
        return method, None
    written = {name: str(v).lower() if isinstance(v, bool) else v for name, v in spec.parameters.items()}
    rest = [f"{name}={value}" for name, value in written.items() if name != "budget"]
    budget = spec.parameters.get("budget", spec.method.parameters.get("budget"))
    return f"{spec.name}:{','.join(rest)}" if rest else spec.name, budget


def row(cell: dict, full: dict | None, base: dict | None = None) -> dict:
    """One cell as a row: its main metric with its standard error, McNemar's test against `base`, bytes, and
    its provenance. full, base: the cells of `full` and of the method that others are compared with, on the
    same task. `compared` is false if `full` does not beat guessing."""
    metric, config = cell["metrics"][0], cell["config"]
    curve, budget = curve_of(cell["method"])
    told = {
        "model": cell["model"],
        "protocol": config.get("protocol"),
        "task": cell["task"],
        "method": cell["method"],
        "curve": curve,
        "budget": budget,
        **metric,
        "chance": cell.get("chance"),
        **dict.fromkeys(("compared", "lost", "won", "p", "differs")),
    }
    if full is not None:
        best = full["metrics"][0]
        told["compared"] = beats(best["value"], best["stderr"], full.get("chance"))
    if base is not None:
        both = cell["values"][metric["metric"]], base["values"][metric["metric"]]
        told["lost"], told["won"], told["p"] = mcnemar(*both) or (None, None, None)
        told["differs"] = differs(*both) if told["compared"] is not False else None
    held = cell.get("bytes", {})
    told |= {name: held.get(name) for name in NAMES}
    whole = full and full["bytes"].get("device_bytes")
    told |= {f"{name}_of_full": held[name] / whole if whole and name in held else None for name in NAMES}
    told |= {"scored": cell.get("scored"), **{name: cell.get(name) for name in COUNTED}}
    told |= {"floor": (cell.get("floor") or {}).get("value")}
    told |= {"shots": cell.get("shots", config.get("num_fewshot"))}  # an older cell knows what was asked for
    told |= {name: config.get(name) for name in ASKED}
    told["dtype"] = told["dtype"] or ("float32" if cell["machine"]["device"] == "cpu" else None)
    told |= {"batch_size": cell.get("batch_size", config.get("batch_size"))}
    return told | {"engine": cell.get("engine", "eager")} | provenance(cell, "task")


def provenance(cell: dict, data: str) -> dict:
    """The provenance of a cell's numbers; data: the configuration's name for the digest of its data."""
    config, machine = cell["config"], cell["machine"]
    return {
        "model_digest": config.get("model"),
        "data_digest": config.get(data),
        "code_digest": config.get("code"),
        "method_digest": config.get("method"),
        "machine": f"{machine['cpu']}, {machine['cores']} cores",
        "device": machine["device"],
        "torch": cell["versions"].get("torch"),
        "commit": cell.get("commit"),
        "made": cell.get("made"),
        "seconds": cell["seconds"],
    }


def write(found: list[dict], stem: Path) -> list[Path]:
    """STEM.csv and STEM.parquet, left as they are where they say the same; returns their paths."""
    table = pandas.DataFrame(found, dtype=object)
    paths = [stem.with_suffix(".csv"), stem.with_suffix(".parquet")]
    text = table.to_csv(index=False)
    if not all(path.is_file() for path in paths) or paths[0].read_text(encoding="utf-8") != text:
        write_file(paths[0], text)
        write_file(paths[1], table.to_parquet(index=False))
    return paths
