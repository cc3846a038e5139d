"""Contents: files identified by their content."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

CONFIGURATIONS = ("config.json", "generation_config.json")
WRITER = "transformers_version"  # what they say of the program that wrote them


def sha256(path: Path) -> str:
    """Of a file's content, 64 hex digits; a file of the hub's cache says it itself."""
    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name):
        return path.name  # so the hub's cache calls what it has checked
    from kvlab.models import files

    return files.sha256(path)


def of_model(folder: Path) -> str:
    """Twelve hex digits of a model's folder: the names and contents of its files, without hidden ones, the
    list of their checksums, and the version that wrote a configuration. So a copy has the same, and so has
    the same model converted by another version of transformers, where nothing else differs."""
    from kvlab.models import files

    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and name.name != files.SUMS and not hidden:
            total.update(f"{name.as_posix()} {_unsigned(path) or sha256(path)}\n".encode())
    return total.hexdigest()[:12]


def on_hub(name: str) -> str:
    """A model's hub id with its newest commit, or, without a network, the one that was fetched; the id alone
    where neither is there, and nothing can be loaded."""
    from transformers.utils import cached_file

    try:
        return f"{name}@{Path(cached_file(name, 'config.json')).parent.name[:12]}"
    except (OSError, ValueError):
        return name


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
