"""The provenance of a number: machine, versions of packages, commit."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import psutil

from kvlab.extras import version
from kvlab.measure.host import cores, cpu_model


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


def machine(device: str = "cpu", threads: int | None = None) -> dict:
    """CPU, cores, RAM in GiB, system, device and threads per process."""
    about = {
        "cpu": cpu_model(),
        "cores": cores(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": threads,
    }
    if device.startswith("cuda"):
        import torch

        about["device"] = f"{device} ({torch.cuda.get_device_name(device)})"
    return about
