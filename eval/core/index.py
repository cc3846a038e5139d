"""Index: what the cells of a folder say, in one file, so that 100,000 of them are not read one by one.

OUT/.index.json holds of every cell its names, configuration, metrics and, of a speed cell, its rows, with a
stamp of the file that they came from, behind a sum of all that. A cell whose stamp is another one, or that
the index does not know, is read; an index that is missing or damaged is made again. So nobody has to keep it
in step: whoever saves a cell leaves it alone, and of two runs that write it the last one's stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable

from .comparable import SPEED

NAME = ".index.json"
KEPT = (
    "model", "method", "task", "config", "seconds", "prefill_seconds", "together", "made", "metrics",
)  # fmt: skip
FEW = 50  # cells that are read again rather than write an index for them


class Index:
    """The index of the cells in `files`, beside them in `home`; `read(name)` reads a cell."""

    def __init__(self, home, files, read: Callable[[str], dict | None]):
        self.home, self.files, self.read = home, files, read

    def summaries(self) -> dict[str, dict]:
        """{file name: the cell without its values} of every readable cell, in the order of the names."""
        known, found, news = self._read(), {}, 0
        for name, stamp in self.files.names().items():
            at = known.get(name)
            if at is None or at[0] != stamp:
                cell = self.read(name)
                news += 1
                if cell is None:
                    continue
                at = stamp, summary(cell)
            found[name] = at
        if news > FEW or (known and len(known) > len(found) + FEW):
            self._write(found)
        return {name: one for name, (_, one) in found.items()}

    def _read(self) -> dict[str, tuple[str, dict]]:
        try:
            total, _, text = (self.home.read(NAME) or b"").partition(b"\n")
            data = json.loads(text) if total == digest(text) else {}
            configs = data.get("configs", [])
            return {
                name: (stamp, one | {"config": configs[one["config"]]})
                for name, (stamp, one) in data.get("cells", {}).items()
            }
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
            return {}

    def _write(self, found: dict[str, tuple[str, dict]]) -> None:
        """Configurations that many cells share are written once. A folder that may only be read has none."""
        configs: dict[str, int] = {}
        cells = {}
        for name, (stamp, one) in found.items():
            number = configs.setdefault(json.dumps(one["config"]), len(configs))
            cells[name] = stamp, one | {"config": number}
        text = json.dumps({"configs": list(map(json.loads, configs)), "cells": cells}, ensure_ascii=False)
        with contextlib.suppress(OSError):
            self.home.write(NAME, digest(text.encode()) + b"\n" + text.encode())


def digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def summary(cell: dict) -> dict:
    """A cell without its values."""
    kept = {key: cell[key] for key in KEPT if key in cell}
    return kept | ({"rows": cell["rows"]} if cell["task"].startswith(SPEED) and "rows" in cell else {})
