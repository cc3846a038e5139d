"""Where and with what a number was made: machine, versions, commit, and digests of code and model.

Every cell of the result store carries these, so a table can say what it stands on and a resumed run
can tell a finished cell from one that was made by other code, another model or other data.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCORING = (
    "accuracy",
    "agreement",
    "batching",
    "prefill",
    "scoring",
    "writing",
)
SMALL = 64 * 2**20  # bytes: files above this are known by name, size and time, not by content


class Problem(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with 2."""


def one_line(error: BaseException | str) -> str:
    """An error's text as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "lm-eval", "kvlab"):
        try:
            found[name] = metadata.version(name.replace("-", "_"))
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def commit() -> str | None:
    """Git commit of the checkout (12 hex digits, `-dirty` after local changes), or None."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


@cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(device: str = "cpu", threads: int | None = None) -> dict:
    """CPU, cores, RAM in GiB, system, device and threads per process."""
    try:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        ram = None
    about = {
        "cpu": _cpu_name(),
        "cores": cores(),
        "ram_gib": round(ram, 1) if ram else None,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": threads,
    }
    if device.startswith("cuda"):
        import torch

        about["device"] = f"{device} ({torch.cuda.get_device_name(device)})"
    return about


def digest(paths) -> str:
    """Twelve hex digits over the names and contents of files; folders are walked, order is fixed."""
    files: set[Path] = set()
    for path in map(Path, paths):
        files |= {p for p in path.rglob("*") if p.is_file()} if path.is_dir() else {path}
    total = hashlib.sha256()
    for path in sorted(files):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        total.update(path.name.encode())
        stat = path.stat()
        if stat.st_size <= SMALL:
            total.update(path.read_bytes())
        else:
            total.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return total.hexdigest()[:12]


@cache
def code_digest() -> str:
    """Digest of the code that makes accuracy and agreement numbers (not of plots, pages or notes)."""
    import kvlab

    root = Path(kvlab.__file__).parent
    core = [p for p in root.glob("*.py") if p.stem not in ("plots", "doctor")]
    rooms = [p for room in ("keep", "store", "place", "kernels") for p in (root / room).glob("*.py")]
    return digest(core + rooms + [HERE / f"{name}.py" for name in SCORING])


@cache
def model_digest(name: str | None) -> str:
    """Digest of a model folder (None: the embedded model); a hub id stands for itself."""
    from kvlab.models import source_of

    source = source_of(name)
    return digest([source]) if Path(source).is_dir() else source
