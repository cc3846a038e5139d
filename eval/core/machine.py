"""Where and with what a number was made: machine, versions of packages, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path


def version(package: str) -> str | None:
    """Of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    names = ("torch", "transformers", "lm-eval", "kvlab")
    return {"python": platform.python_version()} | {name: version(name) or "not installed" for name in names}


@cache
def commit() -> str | None:
    """Git commit of the checkout (12 hex digits, `-dirty` after local changes), or None."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
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
