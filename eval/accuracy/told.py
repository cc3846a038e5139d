"""Told: what a user tells tasks, of which a name that nobody reads would be passed over in silence."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.errors import Problem
from . import cuts
from .own import nearest

MADE = "needles_"  # how the names of local tasks begin whose rows are made for a length and a tokenizer
NAMES = ("lengths", "documents", "tokenizer")  # what these are told


def check(tasks: Iterable[str], strangers: bool, metadata: Iterable[str]) -> None:
    """Problem where a user's own --metadata has a name that our needles do not know. Where strangers are also
    asked, which may know more names, only for a name that is nearly one of ours."""
    if not any(task.startswith(MADE) for task in tasks):
        return
    for name in metadata:
        near = nearest(name, NAMES, 0.8 if strangers else 0.5)
        if name not in NAMES and (near or not strangers):
            raise Problem(
                f"--metadata {name}: {MADE}* does not know it; expected one of {', '.join(NAMES)}{near}"
            )


def cut(task: str, metadata) -> str | None:
    """The text before which a task's YAML says to cut; Problem for a name that is nearly the right one."""
    about = metadata if isinstance(metadata, dict) else {}
    for name in about:
        if name != cuts.FIELD and nearest(cuts.FIELD, [str(name)], 0.8):
            raise Problem(f"task {task}: {name} under metadata: in its YAML; did you mean {cuts.FIELD}?")
    return about.get(cuts.FIELD)
