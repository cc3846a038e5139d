"""Scratch: folders for files that are costly to make and can be made again, even without a writable home."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

KERNELS = Path(__file__).parent / "fast" / "__pycache__"  # where numba keeps what it compiled, if it can
ELSEWHERE = {  # other packages' folders: variable -> folder in the temporary one
    "XDG_CACHE_HOME": "",
    "MPLCONFIGDIR": "matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
}


def folder(name: str) -> Path:
    """$KVLAB_CACHE/NAME, or kvlab/NAME in the user's cache folder; not made yet."""
    set_up()
    kept = os.environ.get("KVLAB_CACHE")
    return (Path(kept) if kept else user_folder() / "kvlab") / name


@cache
def set_up() -> None:
    """Once per process: if $KVLAB_CACHE, or else the user's cache folder, cannot be written (no HOME, a
    read-only one), the caches of this process and its children go to a temporary folder, and one line says
    so. The user's settings for other packages stay, except folders that numba or torch's compiler cannot
    write to."""
    for name, inside in (("NUMBA_CACHE_DIR", "numba"), ("TORCHINDUCTOR_CACHE_DIR", "torchinductor")):
        compiled = os.environ.get(name)
        if compiled and not writable(Path(compiled)):
            os.environ[name] = str(temporary() / inside)
            _say(compiled, os.environ[name])
    kept, home = os.environ.get("KVLAB_CACHE"), user_folder()
    ours, theirs = writable(Path(kept) if kept else home), writable(home)
    if ours and theirs:
        return
    place = temporary()
    if not ours:
        os.environ["KVLAB_CACHE"] = str(place)
    if not theirs:
        hub = home / "huggingface" / "hub" if home else None
        if hub and "HF_HOME" not in os.environ and hub.is_dir():
            os.environ.setdefault("HF_HUB_CACHE", str(hub))  # existing models can still be read
        os.environ["XDG_CACHE_HOME"] = str(place)
        for name, inside in ELSEWHERE.items():
            os.environ.setdefault(name, str(place / inside))
        if not writable(KERNELS):
            os.environ.setdefault("NUMBA_CACHE_DIR", str(place / "numba"))
    _say(kept if kept and not ours else home or "the user's cache folder", place)


def _say(what: str | Path, place: str | Path) -> None:
    print(f"kvlab: {what} cannot be written; caches go to {place}", file=sys.stderr, flush=True)


def user_folder() -> Path | None:
    """This system's folder for a user's caches; None for a user without a home."""
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None


def writable(place: Path | None) -> bool:
    """Whether files can be made in this folder, or in the one it would be made in."""
    return place is not None and why_not(place) is None


def why_not(place: Path) -> str | None:
    """Why no file can be made in this folder, or in the one it would be made in; None: it can."""
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def temporary() -> Path:
    """A folder in the system's temporary folder that only this user can enter, the same every time."""
    if hasattr(os, "getuid"):
        place = Path(tempfile.gettempdir()) / f"kvlab-{os.getuid()}"
        with suppress(OSError):
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return place
    return Path(tempfile.mkdtemp(prefix="kvlab-"))


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """This process's own folder inside `folder`, for unfinished files; those that killed processes of this
    machine left are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = f".{platform.node()}.unfinished"
    for left in folder.glob(f".*{ours}"):
        owner = left.name[1:].partition("-")[0]
        if not (owner.isdigit() and psutil.pid_exists(int(owner))):
            shutil.rmtree(left, ignore_errors=True)
    work = tempfile.mkdtemp(dir=folder, prefix=f".{os.getpid()}-", suffix=ours)
    try:
        yield Path(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_target(path: str) -> None:
    """OSError for a file that `written_whole` could not write, before anything is computed."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if target.exists() and not target.is_file():
        return
    target = target.resolve()  # a link may lead to what is not there yet
    there = target.exists()
    target.touch()
    if not there:
        target.unlink()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`, which it replaces once all of it is there: a full disk costs
    nothing that `path` held. An OSError names `path`. What is no regular file, such as a pipe, is written
    itself."""
    path = Path(path)
    if not path.exists() or path.is_file():  # a pipe's name says nothing once it is resolved
        path = path.resolve()
        part = path.with_name(f".{path.name}.{os.getpid()}")
    else:
        part = path
    try:
        yield part
        if part is not path:
            part.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        if part is not path:
            part.unlink(missing_ok=True)


def move(made: Path, home: Path) -> None:
    """Give a finished folder its name, unless another process was faster."""
    try:
        made.rename(home)
    except OSError:
        if not home.is_dir():
            raise
