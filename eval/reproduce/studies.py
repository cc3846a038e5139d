"""Studies: `studies.toml` read as the measurements that it names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from ..accuracy.accuracy import Accuracy
from ..accuracy.protocols import FIRST, INSIDE
from ..core.errors import Problem
from ..core.measurement import Measurement
from ..studies.measurements import Perplexity

FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SETS, DEFAULTS = FILE.pop("sets"), FILE.pop("defaults")
STUDIES: dict[str, dict] = {name: FILE.get(one.get("like"), {}) | one for name, one in FILE.items()}
SAID = ("about", "points", "like", "needs", "measures", "parts", "quick", "protocols")  # all else are options
ONE = ["0.2"]  # the budgets of a quick run


def parts(name: str, quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """{folder: measurement} of a study; none where it needs the user's rows and there are none. Raises
    Problem for a file that is not among them."""
    study = STUDIES[name]
    if study.get("needs") and rows is None:
        return {}
    instead, made = study.get("quick", {}) if quick else {}, {}
    for part, more in study.get("parts", {"": {}}).items():
        if part not in instead.get("parts", [part]):
            continue
        asked = DEFAULTS | study | more | {key: one for key, one in instead.items() if key != "parts"}
        options = {key: value for key, value in asked.items() if key not in SAID}
        if quick and len(options["budgets"]) > 1:
            options["budgets"] = ONE
        if rows is None:
            options.pop("data", None)
        options = {key: filled(value, rows) for key, value in options.items()}
        if study.get("measures") == "perplexity":
            made[part or str(options.get("model", "workshop"))] = Perplexity(
                **options | ({"text": Path(options["text"])} if "text" in options else {})
            )
            continue
        for protocol in asked.get("protocols", (FIRST, INSIDE)):
            made["-".join(filter(None, (part, protocol)))] = Accuracy(protocol=protocol, jobs=0, **options)
    return made


def filled(value, rows: Path | None):
    """An option with the files and the sets that it names."""
    if isinstance(value, list):
        each = (filled(SETS[one[1:]], rows) if one[:1] == "@" else [filled(one, rows)] for one in value)
        return tuple(dict.fromkeys(one for some in each for one in some))
    if isinstance(value, str):
        return re.sub(r"rows/([\w-]+)(\.\w+)", lambda match: str(found(rows, *match.groups())), value)
    return value


def found(rows: Path, name: str, ending: str) -> Path:
    """A task's file in the user's folder. Raises Problem where there is none."""
    names = [f"{name}{part}{ending}" for part in ("", "_validation", "_test")]
    for file in names:
        if (rows / file).is_file():
            return rows / file
    raise Problem(f"--rows {rows}: expected {' or '.join(names)} in this folder")
