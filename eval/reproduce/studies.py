"""The measurement `reproduce`: the studies of `studies.toml`, whose missing cells are made and collected."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from ..accuracy.accuracy import Accuracy
from ..accuracy.protocols import FIRST, INSIDE
from ..core.digests import ROOT
from ..core.errors import Problem
from ..core.measurement import Measurement, flag, option
from ..core.results import Store
from ..studies.measurements import Perplexity

FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SETS, DEFAULTS = FILE.pop("sets"), FILE.pop("defaults")
STUDIES: dict[str, dict] = {}
for name, one in FILE.items():  # like: one that comes later, or one that is like another itself
    STUDIES[name] = STUDIES.get(one.get("like"), FILE.get(one.get("like"), {})) | one
SAID = ("about", "points", "like", "needs", "measures", "parts", "quick", "protocols")  # all else are options
ONE = ["0.2"]  # the budgets of a quick run


@dataclass(kw_only=True)
class Reproduce(Measurement):
    """Studies are measurements of other kinds, each in folders of its own."""

    name = home = "reproduce"
    about = "run the studies of docs/results whose cells are missing, and collect them"

    collect: bool = flag("copy stored cells into docs/results and the pages, and measure nothing")
    studies: tuple[str, ...] = option(f"{', '.join(STUDIES)} (default: all)", (), many=True, metavar="STUDY")
    quick: bool = flag("run a few documents each, and collect in --out only")
    rows: Path | None = option(  # noqa: RUF009
        "folder of your own files: piqa.jsonl, copa.jsonl, hellaswag.jsonl, lambada.jsonl, wikitext2.txt, "
        "profiles, and GGUF files of models",
        type=Path,
    )

    @property
    def folder(self) -> Path:
        return self.out or Path("results") / (f"{self.home}-quick" if self.quick else self.home)

    @property
    def in_documents(self) -> bool:
        """Whether collected rows go to docs/results, or beside their cells."""
        return not self.quick and self.out is None

    def check(self) -> None:
        for name in self.studies:
            if name not in STUDIES:
                raise Problem(f"--studies {name}: expected one of {', '.join(STUDIES)}")
        if self.rows is not None and not self.rows.is_dir():
            raise Problem(f"--rows {self.rows}: there is no such folder")

    def file(self, name: str) -> Path:
        """Where a study is collected."""
        return (ROOT / "docs" / "results" if self.in_documents else self.folder) / f"{name}.json"

    def run(self, store, show) -> int:
        """Every study's missing cells; returns how many cells or studies could not be made."""
        failed = 0
        for name in () if self.collect else self.studies or STUDIES:
            try:
                failed += self.make_study(name, show)
            except ValueError as problem:
                failed += 1
                show.line(f"{name}: {problem}")
        return failed

    def make_study(self, name: str, show) -> int:
        """Make a study's missing cells; returns how many could not be made."""
        failed, made = 0, parts(name, self.quick, self.rows)
        if not made:
            show.line(f"{name}: left out, since it reads files of --rows FOLDER (docs/results.md)")
        for part, measurement in made.items():
            measurement.out = self.folder / name / part
            show.line(f"{name}, {part}: {measurement.folder}")
            measurement.check()
            store = Store(measurement.folder, show.line)
            store.prepare()
            failed += measurement.run(store, show)
        return failed


def parts(name: str, quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """{folder: measurement} of a study; none where it needs the user's rows and there are none."""
    study = STUDIES[name]
    if study.get("needs") and rows is None:
        return {}
    instead, made = study.get("quick", {}) if quick else {}, {}
    for part, more in study.get("parts", {"": {}}).items():
        if part not in instead.get("parts", [part]):
            continue
        asked = DEFAULTS | study | more | {key: one for key, one in instead.items() if key != "parts"}
        if quick and len(asked["budgets"]) > 1:
            asked["budgets"] = ONE
        if rows is None:
            asked.pop("data", None)
        options = {key: filled(value, rows) for key, value in asked.items() if key not in SAID}
        if study.get("measures") == "perplexity":
            options |= {"text": Path(options["text"])} if "text" in options else {}
            made[part or Path(options.get("model", "workshop")).name] = Perplexity(**options)
            continue
        for protocol in asked.get("protocols", (FIRST, INSIDE)):
            made["-".join(filter(None, (part, protocol)))] = Accuracy(protocol=protocol, jobs=0, **options)
    return made


def filled(value, rows: Path | None):
    """An option with the sets and the user's folder that it names."""
    if isinstance(value, list):
        each = (filled(SETS[one[1:]], rows) if one[:1] == "@" else [filled(one, rows)] for one in value)
        return tuple(dict.fromkeys(one for some in each for one in some))
    return value.replace("rows/", f"{rows}/") if isinstance(value, str) else value
