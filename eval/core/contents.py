"""Contents: files identified by their content; large ones are read once, and their checksums kept."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from .files import write_file

LARGE = 64 * 2**20  # bytes: the sums of larger files are kept
CONFIGURATIONS = ("config.json", "generation_config.json")
WRITER = "transformers_version"  # what they say of the program that wrote them


def sha256(path: Path) -> str:
    """Of a file's content, 64 hex digits.

    A large file's is kept for its path, size and times, so that it is read once on a machine, and again when
    any of them is another. A file of the hub's cache says it itself. Where the cache folder cannot be
    written, it is read every time.
    """
    from kvlab import scratch
    from kvlab.models import files

    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name):
        return path.name  # so the hub's cache calls what it has checked
    before = _stamp(path)
    if path.stat().st_size <= LARGE:
        return files.sha256(path)
    kept = scratch.folder("sums") / hashlib.sha256(before.encode()).hexdigest()[:32]
    try:
        known = kept.read_text(encoding="ascii")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    except (OSError, ValueError):
        pass  # not there, or another's bytes: it is read
    found = files.sha256(path)
    if _stamp(path) == before:  # unchanged meanwhile
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_file(kept, found)  # whole or not at all: two processes may do so at once
        except OSError:
            pass
    return found


def of_model(folder: Path) -> str:
    """Twelve hex digits of a model's folder: the names and contents of its files, without hidden ones, the
    list of their checksums, and the version that wrote a configuration. So a copy has the same, and so has
    the same model converted by another version of transformers, where nothing else differs."""
    from kvlab.models.files import SUMS

    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.name != SUMS and not any(part.startswith(".") for part in name.parts):
            total.update(f"{name.as_posix()} {_unsigned(path) or sha256(path)}\n".encode())
    return total.hexdigest()[:12]


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _unsigned(path: Path) -> str | None:
    """The sum of a configuration without its writer's version; None of any other file."""
    if path.name not in CONFIGURATIONS:
        return None
    try:
        said = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(said, dict) or WRITER not in said:
        return None
    del said[WRITER]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
