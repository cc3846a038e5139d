"""The measurement `reproduce`: every study's missing cells, one JSON file each, and the documents' tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.digests import ROOT
from ..core.errors import Failed, Problem
from ..core.machine import commit
from ..core.measurement import Measurement, option, run
from ..core.results import Store
from .studies import STUDIES


@dataclass(kw_only=True)
class Reproduce(Measurement):
    """Studies are measurements of other kinds, each in folders of its own."""

    name = home = "reproduce"
    about = "the studies of docs/results, made again where cells are missing, and collected"

    studies: tuple[str, ...] = option(f"{', '.join(STUDIES)} (default: all)", (), many=True, metavar="STUDY")
    quick: bool = option("a few documents each, collected in --out only", False, action="store_true")
    rows: Path | None = option(  # noqa: RUF009
        "folder of files that you have: piqa.jsonl, copa.jsonl, hellaswag.jsonl, wikitext2.txt, and profiles",
        type=Path,
    )
    collect: bool = option("make nothing, collect what is there", False, action="store_true")

    @property
    def folder(self) -> Path:
        return self.out or Path("results") / (f"{self.home}-quick" if self.quick else self.home)

    def check(self) -> None:
        for name in self.studies:
            if name not in STUDIES:
                raise Problem(f"--studies {name}: expected one of {', '.join(STUDIES)}")
        if self.rows is not None and not self.rows.is_dir():
            raise Problem(f"--rows {self.rows}: there is no such folder")

    def cells(self) -> list:
        return []

    def write(self, store, show, wanted: list) -> None:
        """Make, collect and set into tables, study by study; one that cannot be made is said and passed."""
        from . import tables
        from .collect import collect
        from .collect import show as show_beside

        failed = 0
        if not self.collect and (commit() or "").endswith("-dirty"):
            show.line(f"this checkout has changes that are not committed: cells made now carry {commit()}")
        for name in self.studies or STUDIES:
            if not self.collect:
                try:
                    failed += self._make(name, show)
                except Problem as problem:
                    failed += 1
                    show.line(f"{name}: {problem}")
            file = self.home_of(name)
            folders = sorted(part for part in (self.folder / name).glob("*") if part.is_dir())
            count, before = collect(name, STUDIES[name].about, folders, file)
            there = ", those of before are shown again" if file.is_file() else ""
            beside = f", beside {before} of before, whose cells are not here" if before else ""
            show.line(
                f"{name}: {count} rows in {file}{beside}"
                if count
                else f"{name}: there are no cells yet{there}"
            )
            if file.is_file():
                show_beside(file, STUDIES[name].points)
        if not self.quick and self.out is None:
            for document in tables.DOCUMENTS:
                tables.fill(document)
        if failed:
            raise Failed(f"{failed} cells or studies could not be made; the same command tries them again")

    def home_of(self, name: str) -> Path:
        """Where a study is collected: in docs/results, or beside its cells."""
        own = self.quick or self.out is not None
        return (self.folder if own else ROOT / "docs" / "results") / f"{name}.json"

    def _make(self, name: str, show) -> int:
        """Make a study's missing cells; returns how many could not be made."""
        failed, parts = 0, STUDIES[name].parts(self.quick, self.rows)
        if not parts:
            show.line(f"{name}: left out, since it reads files of --rows FOLDER (docs/results.md)")
        for part, measurement in parts.items():
            measurement.out = self.folder / name / part
            show.line(f"{name}, {part}: {measurement.folder}")
            measurement.check()
            store = Store(measurement.folder, show.line)
            store.prepare()
            failed += run(measurement, store, show)
        return failed
