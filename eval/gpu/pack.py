"""Pack: a folder that a machine without a network needs nothing beside, but Python and a torch with CUDA.

    FOLDER/run                bash FOLDER/run [OPTIONS OF python -m eval gpu]
    FOLDER/site        kvlab with eval and transformers, as wheels, which are always used
    FOLDER/wheels      what those need, for CPython 3.12 on x86-64, used where the machine lacks it
    FOLDER/triton      our kernels for an H100, where Triton is installed here
    FOLDER/model       a model for the stage accuracy: the folder that KVLAB_MODEL names

Wheels are asked of pip, which takes them from its own cache or the package index. What is over LIMIT is left
out, the least needed first, and said.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from ..core.digests import ROOT
from ..core.errors import Problem, one_line
from ..core.machine import commit, cores
from .accuracy import carried

LIMIT = 64 * 2**20  # bytes
FITS = 60 * 2**20  # bytes that we fill: what carries a folder may add to it
OURS = ("kvlab", "eval")
PURE = (
    "transformers", "huggingface_hub", "filelock", "tqdm", "packaging", "rich", "markdown-it-py", "mdurl",
    "pygments",
)  # fmt: skip
COMPILED = ("tokenizers", "safetensors", "psutil", "regex", "pyyaml")  # of machine code
PYTHON, PLATFORMS = "3.12", [f"manylinux_2_{n}_x86_64" for n in (17, 24, 26, 27, 28, 31, 34, 35)] + [
    "manylinux2014_x86_64", "manylinux1_x86_64", "manylinux2010_x86_64",
]  # fmt: skip
BESIDE = 45 * 2**20  # bytes of a pack without a model, about
KERNELS = 1200.0  # seconds that compiling them may take

RUN = """#!/usr/bin/env bash
# Runs `python -m eval gpu` from this folder, with whatever Python and torch this machine has.
# bash run [OPTIONS]; PYTHON=/path/to/python bash run. Results: ./gpu-results/gpu.json (or --out FOLDER).
# What is compiled stays in $TMPDIR/kvlab-pack-* for the next run (KVLAB_SCRATCH names another folder).
set -u
export KVLAB_BEGUN="${KVLAB_BEGUN:-$(date +%s)}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
name="kvlab-pack-$(id -u)-$(printf %s "$here" | cksum | cut -d ' ' -f 1)"
scratch="${KVLAB_SCRATCH:-${TMPDIR:-/tmp}/$name}"
mkdir -p "$scratch" && [ -O "$scratch" ] && chmod 700 "$scratch" || {
  echo "error: $scratch cannot be written; name another folder: KVLAB_SCRATCH=FOLDER bash run" >&2; exit 2; }
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
"$python" "$here/ready.py" "$here" "$scratch" || exit 2
export PYTHONPATH="$scratch/kvlab:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="$scratch/triton"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$scratch/inductor}"
export KVLAB_CACHE="$scratch/cache" NUMBA_CACHE_DIR="$scratch/numba" KVLAB_COMMIT="$(cat "$here/commit.txt")"
[ -d "$here/model" ] && export KVLAB_MODEL="${KVLAB_MODEL:-$here/model}"
case " $* " in *" --out "*) ;; *) set -- "$@" --out "$PWD/gpu-results" ;; esac
"$python" -m eval gpu "$@"
"""

READY = '''"""Unpacks what this machine lacks into SCRATCH/site: python ready.py HERE SCRATCH."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

here, scratch = Path(sys.argv[1]), Path(sys.argv[2])
site, ours = scratch / "site", scratch / "kvlab"  # apart: digests of code follow what lies beside kvlab


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def unpack(wheels, into=site) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(into)


def works(line: str) -> str:
    """Why a line of Python fails with what is unpacked; nothing where it works."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", line], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    return (done.stderr.strip() or "it fails").splitlines()[-1] if done.returncode else ""


if importlib.util.find_spec("torch") is None:
    say(f"error: {sys.executable} has no torch; name another Python: PYTHON=/path/to/python bash run")
    sys.exit(1)
say(f"Python {sys.version.split()[0]}, {sys.executable}")
for old in (ours, site):  # of an earlier run; what was compiled stays
    shutil.rmtree(old, ignore_errors=True)
unpack((here / "site").glob("kvlab-*.whl"), ours)
unpack((here / "site").glob("transformers-*.whl"))
for line in (here / "modules.txt").read_text().split():
    module, name = line.split("=")
    if importlib.util.find_spec(module) is None:
        wheels = list((here / "wheels").glob(f"{name}-*.whl"))
        unpack(wheels)
        found = f"taken from {wheels[0].name}" if wheels else "not in this pack"
        say(f"{module} is missing here: {found}")
TRY = "from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig"
if why := works(TRY):
    say(f"transformers does not start with the packages of this machine ({why}): taking the pack's")
    unpack((here / "wheels").glob("*.whl"))
    if why := works(TRY):
        say(f"transformers does not start ({why}): stages that need a model will fail")
for made in (here / "triton").glob("*/__grp__*.json") if (here / "triton").is_dir() else ():
    place = scratch / "triton" / made.parent.name  # where Triton looks; its lists hold whole paths
    shutil.copytree(made.parent, place, dirs_exist_ok=True)
    paths = {file.name: str(file) for file in place.iterdir() if not file.name.startswith("__grp__")}
    stem = made.name[len("__grp__") : -len(".json")]
    paths = {name: path for name, path in paths.items() if name.rpartition(".")[0] == stem}
    (place / made.name).write_text(json.dumps({"child_paths": paths}))
'''
MODULES = {  # what eval and transformers import, and the wheel it comes in
    "numpy": "numpy", "psutil": "psutil", "mdurl": "mdurl", "markdown_it": "markdown_it_py",
    "pygments": "pygments", "rich": "rich", "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "tokenizers": "tokenizers", "regex": "regex", "yaml": "pyyaml", "packaging": "packaging", "tqdm": "tqdm",
    "filelock": "filelock", "transformers": "transformers",
}  # fmt: skip


def pack(folder: Path, kernels: bool = True) -> list[str]:
    """Write the folder; returns what is to be said of it, a line each. Raises Problem where it is not empty
    or cannot be written."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "modules.txt").is_file():
        raise Problem(f"--pack {folder}: the folder is not empty and no pack; name another one")
    said = []
    try:
        if folder.exists():
            shutil.rmtree(folder)
        (folder / "site").mkdir(parents=True)
        (folder / "wheels").mkdir()
    except OSError as error:
        raise Problem(f"--pack {folder}: {one_line(error)}") from error
    ours(folder / "site")
    (folder / "run").write_text(RUN, encoding="utf-8")
    (folder / "ready.py").write_text(READY, encoding="utf-8")
    (folder / "modules.txt").write_text(
        "".join(f"{module}={name}\n" for module, name in MODULES.items()), encoding="utf-8"
    )
    (folder / "commit.txt").write_text(f"{commit() or 'unknown'}\n", encoding="utf-8")
    (folder / "run").chmod(0o755)
    said += weights(folder / "model")
    for name in (*PURE, *COMPILED):
        try:
            fetched(name, folder / ("site" if name == "transformers" else "wheels"), name in COMPILED)
        except (OSError, subprocess.SubprocessError, Problem) as error:
            said.append(f"{name}: not packed: {one_line(error)}")
    if kernels:
        said.append(compiled(folder / "triton"))
    for spare in ("triton", "wheels"):
        if size_of(folder) > FITS:
            shutil.rmtree(folder / spare, ignore_errors=True)
            said.append(f"{spare}: left out, {LIMIT / 2**20:.0f} MiB would not do")
    said.append(f"{folder}: {size_of(folder) / 2**20:.1f} MiB; there: bash {folder.name}/run")
    return said


def ours(site: Path) -> None:
    """kvlab and eval as a wheel: the files that an installed one has, without what only tests need."""
    import zipfile

    name = f"kvlab-{version()}"
    with zipfile.ZipFile(site / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for package in OURS:
            for file in sorted((ROOT / package).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                    wheel.write(file, file.relative_to(ROOT).as_posix())
        about = f"Metadata-Version: 2.1\nName: kvlab\nVersion: {version()}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def version() -> str:
    import kvlab

    return kvlab.__version__


def weights(into: Path) -> list[str]:
    """Take along the model that KVLAB_MODEL names."""
    folder = carried()
    if folder is None:
        return []
    files = [file for file in folder.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if size > FITS - BESIDE:
        return [f"{folder}: {size / 2**20:.0f} MiB are too many to take along"]
    into.mkdir()
    for file in files:
        shutil.copy(file, into)
    return [f"{folder}: taken along, for the stage accuracy"]


def fetched(name: str, into: Path, machine_code: bool) -> Path:
    """The wheel of the version that is installed here, for the machine that is meant."""
    wanted = f"{name}=={metadata.version(name)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if machine_code:
        command += ["--python-version", PYTHON, "--implementation", "cp"]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run([*command, "-d", place, wanted], capture_output=True, text=True, timeout=300)
        found = list(Path(place).glob("*.whl"))
        if done.returncode or not found:
            lines = (done.stderr.strip() or "pip found no wheel").splitlines()
            raise Problem(f"{wanted}: {lines[-1][:200]}")
        return Path(shutil.copy(found[0], into / found[0].name))


def compiled(folder: Path) -> str:
    """Our kernels for an H100, by the Triton that is installed here; the line to be said of them."""
    from .precompile import CAPABILITY, started

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton: not installed here: the kernels are compiled there"
    folder.mkdir()
    processes, until, how = started(folder, CAPABILITY, cores()), time.monotonic() + KERNELS, ""
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            how = " (others took too long)"
    for file in folder.rglob("*"):  # what launching does not read
        if file.suffix in (".ttir", ".ttgir", ".llir", ".ptx", ".source"):
            file.unlink()
    kernels = len(list(folder.rglob("*.cubin")))
    return f"triton: {kernels} kernels for sm_{CAPABILITY}, of use to Triton {triton} alone{how}"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
