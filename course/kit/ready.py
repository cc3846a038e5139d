"""Ready: is this machine ready for a classroom? What `kvlab doctor --workshop` asks besides."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kvlab import doctor

TAUGHT_WITH = ("transformers", "numpy", "matplotlib", "onnxruntime", "jupyterlab", "lm-eval")
# GiB, and what is said where there are fewer: for a browser's tab, JupyterLab and a chapter's kernel.
FOR_A_CHAPTER = 1.5, "a chapter needs 1.5 GiB, close other programs and tabs"
NEEDED_DISK = 0.5e9  # bytes, once the environment is there: notebooks, compiled kernels, what a browser keeps
PORTS = range(8888, 8898)  # JupyterLab takes the first that is free


def workshop(kit: str | os.PathLike = "") -> list[doctor.Check]:
    """The checks of a machine in a classroom; kit: its folder, to ask for the stick as well."""
    return [
        *doctor.first_checks(TAUGHT_WITH),
        ("free memory", lambda: doctor.check_memory(*FOR_A_CHAPTER)),
        ("free disk", lambda: check_disk(kit or ".")),
        ("ports", check_ports),
        ("workshop model", doctor.check_model),
        *([("offline set-up", lambda: check_stick(kit))] if kit else []),
    ]


def check_disk(folder: str | os.PathLike = ".") -> doctor.Result:
    """There is room where the notebooks are."""
    free = shutil.disk_usage(folder).free
    text = f"free disk: {free / 1e9:.1f} GB"
    if free < NEEDED_DISK:
        return False, f"{text}: {NEEDED_DISK / 1e9:.1f} GB are needed, clear up or choose another disk"
    return True, text


def check_ports(ports: Iterable[int] = PORTS) -> doctor.Result:
    """A port of this machine is free for JupyterLab."""
    for port in ports:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return True, f"port {port}: free for JupyterLab"
    return False, "no port of 8888 to 8897 is free for JupyterLab: close other notebook servers"


def check_stick(folder: str | os.PathLike = ".") -> doctor.Result:
    """Whether the kit in `folder` can be set up without a network: asked of pip, nothing is installed."""
    setup = Path(folder) / "setup"
    wheels = setup / "wheels"
    if not wheels.is_dir():
        return None, (
            "offline set-up: no folder setup/wheels here, so every machine downloads about 350 MB "
            "(to fill it: run `sh start.sh --stick` in the unpacked folder kvlab-learner, and carry that one)"
        )
    size = sum(path.stat().st_size for path in wheels.iterdir())
    text = f"offline set-up: setup/wheels, {size / 1e6:.0f} MB"
    if missing := lacking(setup, "requirements-torch.txt", "requirements.txt"):
        return False, f"{text}, lacks {missing}: run `sh start.sh --stick` on such a machine, with a network"
    if lacking(setup, "requirements-torch.txt", "requirements.txt", "requirements-all.txt"):
        return None, (
            f"{text}, has all that such a machine needs, but not what chapter 8 scores with: for a day that "
            "teaches it, run `sh start.sh --stick --all` on such a machine, with a network"
        )
    return True, f"{text}, has all that such a machine needs, chapter 8 included"


def lacking(setup: Path, *names: str) -> str:
    """What setup/wheels lacks of these lists of requirements, as pip names it; "" where it has all."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index"]
    command += ["--quiet", "--disable-pip-version-check", "--find-links", str(setup / "wheels")]
    command += ["-c", str(setup / "constraints.txt")]
    for name in names:
        command += ["-r", str(setup / name)]
    asked = subprocess.run(command, capture_output=True, text=True)
    if not asked.returncode:
        return ""
    lines = [line for line in asked.stderr.splitlines() if "No matching distribution" in line] or [""]
    return lines[-1].rpartition(" for ")[2] or "something"
