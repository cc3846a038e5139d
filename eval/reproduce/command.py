"""The measurement `reproduce`: every study's missing cells, one JSON file each, and the documents' tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.digests import ROOT
from ..core.errors import Problem
from ..core.machine import commit
from ..core.measurement import Measurement, option
from ..core.results import Store
from .studies import STUDIES, parts


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

    @property
    def in_documents(self) -> bool:
        """Whether what is collected stands in docs/results, or beside its cells."""
        return not self.quick and self.out is None

    def file(self, name: str) -> Path:
        """Where a study is collected."""
        return (ROOT / "docs" / "results" if self.in_documents else self.folder) / f"{name}.json"

    def run(self, store, show) -> int:
        """Every study's missing cells; one that cannot be made is said and passed."""
        if self.collect:
            return 0
        failed = 0
        if (commit() or "").endswith("-dirty"):
            show.line(f"this checkout has changes that are not committed: cells made now carry {commit()}")
        for name in self.studies or STUDIES:
            try:
                failed += self.make_study(name, show)
            except Problem as problem:
                failed += 1
                show.line(f"{name}: {problem}")
        if failed:
            show.line(f"{failed} cells or studies could not be made; the same command tries them again")
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
