"""Unpack: unpacks missing packages and a pack's kernels: python unpack.py HERE SCRATCH.

A pack holds a copy of this file, which runs there before anything else of the pack is: plain Python alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

TRY = "from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, OPTConfig"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def unpack(wheels, into: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(into)


def lacks(wheel: Path) -> bool:
    """Whether a module of this wheel is missing here."""
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0].partition(".")[0] for name in file.namelist() if "-info/" not in name}
    return any(importlib.util.find_spec(top) is None for top in tops)


def works(site: Path) -> str:
    """Why transformers does not start with what is unpacked; nothing where it does."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", TRY], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    return (done.stderr.strip() or "it fails").splitlines()[-1] if done.returncode else ""


def kernels(pack: Path, into: Path) -> None:
    """Unpack compiled kernels to where Triton looks; its lists of files hold whole paths."""
    with tarfile.open(pack) as file:
        file.extractall(into, filter="data")
    for group in into.glob("*/__grp__*.json"):
        stem = group.name[len("__grp__") : -len(".json")]
        files = [file for file in group.parent.iterdir() if file.name.rpartition(".")[0] == stem]
        group.write_text(json.dumps({"child_paths": {file.name: str(file) for file in files}}))


def main(here: Path, scratch: Path) -> int:
    if importlib.util.find_spec("torch") is None:
        say(f"error: {sys.executable} has no torch; name another Python: PYTHON=/path/to/python bash run")
        return 1
    say(f"Python {sys.version.split()[0]}, {sys.executable}")
    site, ours = scratch / "site", scratch / "kvlab"
    for old in (ours, site):  # of an earlier run; what was compiled stays
        shutil.rmtree(old, ignore_errors=True)
    unpack((here / "site").glob("kvlab-*.whl"), ours)
    unpack((here / "site").glob("transformers-*.whl"), site)
    for wheel in (here / "wheels").glob("*.whl"):
        if lacks(wheel):
            unpack([wheel], site)
            say(f"taken from the pack: {wheel.name}")
    if why := works(site):
        say(f"transformers does not start with the packages of this machine ({why}): taking the pack's")
        unpack((here / "wheels").glob("*.whl"), site)
    if (here / "triton.tar.xz").is_file():
        kernels(here / "triton.tar.xz", scratch / "triton")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
