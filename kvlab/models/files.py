"""Files: the checksums beside a model's files, and what no longer agrees with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUMS = "sha256.txt"


def sha256(file: Path) -> str:
    """Of a file's content, 64 hex digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """List every file of a model's folder in `sha256.txt`, as `sha256sum` writes it."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir()) if file.name != SUMS]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is missing from a folder or not as `sha256.txt` says, the first such file; None: nothing."""
    listed = folder / SUMS
    if not listed.is_file():
        return f"{folder} is incomplete: {SUMS} is missing"
    for line in listed.read_text(encoding="utf-8").splitlines():
        expected, name = line.split()
        file = folder / name
        if not file.is_file():
            return f"{folder} is incomplete: {name} is missing"
        if sha256(file) != expected:
            return (
                f"{file} is damaged: its {file.stat().st_size:,} bytes have another sha256 than {SUMS} says"
            )
    return None
