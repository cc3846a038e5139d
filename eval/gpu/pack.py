"""Pack: a folder for a machine without a network, which then needs only Python and a torch with CUDA.

    FOLDER/run                bash FOLDER/run [OPTIONS OF python -m eval gpu]
    FOLDER/site        kvlab with eval and transformers, as wheels, which are always used
    FOLDER/wheels      what those need, for CPython 3.12 on x86-64, used where the machine lacks it
    FOLDER/triton.tar.xz      our kernels for an H100, where Triton is installed here

Wheels are asked of pip, which takes them from its own cache or the package index. Where all of it is over
LIMIT, what those need is left out, and said.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from kvlab.measure.host import cores

from ..core.digests import HARNESS, ROOT
from ..core.errors import Problem, one_line
from ..core.machine import commit
from . import precompile

LIMIT = 50e6  # bytes
NEEDED = (  # what eval and kvlab import, and what that needs
    "transformers", "huggingface_hub", "filelock", "tqdm", "packaging", "rich", "markdown-it-py", "mdurl",
    "pygments", "tokenizers", "safetensors", "psutil", "regex", "pyyaml",
)  # fmt: skip
GLIBC = ("1", "2010", "2014", *(f"_2_{n}" for n in (17, 24, 26, 27, 28, 31, 34, 35)))
KERNELS = 1200.0  # seconds that compiling them may take
READ = (".cubin", ".json")  # what launching reads of a compiled kernel


def pack(folder: Path, kernels: bool = True) -> list[str]:
    """Write the folder; returns what is to be said of it, a line each. Problem where it is not empty."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "unpack.py").is_file():
        raise Problem(f"--pack {folder}: the folder is not empty and no pack; name another one")
    said = []
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "site").mkdir(parents=True)
    (folder / "wheels").mkdir()
    ours(folder / "site")
    here = Path(__file__).parent
    shutil.copy(here / "run.sh", folder / "run")
    (folder / "run").chmod(0o755)
    shutil.copy(here / "unpack.py", folder)
    (folder / "commit.txt").write_text(f"{commit() or 'unknown'}\n", encoding="utf-8")
    for name in NEEDED:
        try:
            fetched(name, folder / ("site" if name == "transformers" else "wheels"))
        except (OSError, subprocess.SubprocessError, Problem) as error:
            said.append(f"{name}: not packed: {one_line(error)}")
    if kernels:
        said.append(compiled(folder / "triton.tar.xz"))
    if size_of(folder) > LIMIT:
        shutil.rmtree(folder / "wheels")
        said.append(f"wheels: left out, {LIMIT / 1e6:.0f} MB would not do")
    said.append(f"{folder}: {size_of(folder) / 1e6:.1f} MB; there: bash {folder.name}/run")
    return said


def ours(site: Path) -> None:
    """kvlab and eval as a wheel, without the weights of built-in models."""
    version = metadata.version("kvlab")
    name = f"kvlab-{version}"
    with zipfile.ZipFile(site / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for package, folder in (("kvlab", ROOT / "kvlab"), ("eval", HARNESS)):
            for file in sorted(folder.rglob("*")):
                if file.is_file() and not {"__pycache__", "checkpoint", "checkpoint-opt"} & {*file.parts}:
                    wheel.write(file, f"{package}/{file.relative_to(folder).as_posix()}")
        about = f"Metadata-Version: 2.1\nName: kvlab\nVersion: {version}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def fetched(name: str, into: Path) -> None:
    """The wheel of the version that is installed here, for the machine that is meant."""
    wanted = f"{name}=={metadata.version(name)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    command += [word for name in GLIBC for word in ("--platform", f"manylinux{name}_x86_64")]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run([*command, "-d", place, wanted], capture_output=True, text=True, timeout=300)
        found = list(Path(place).glob("*.whl"))
        if done.returncode or not found:
            lines = (done.stderr.strip() or "pip found no wheel").splitlines()
            raise Problem(f"{wanted}: {lines[-1][:200]}")
        shutil.copy(found[0], into)


def compiled(file: Path) -> str:
    """Our kernels for an H100, by the Triton that is installed here; the line to be said of them."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton: not installed here: the kernels are compiled there"
    with tempfile.TemporaryDirectory() as place:
        whole = precompile.together(Path(place), precompile.CAPABILITY, cores(), KERNELS)
        with tarfile.open(file, "w:xz") as made:
            for one in sorted(Path(place).rglob("*")):
                if one.suffix in READ:
                    made.add(one, one.relative_to(place))
        kernels = len(list(Path(place).rglob("*.cubin")))
    late = "" if whole else " (others took too long)"
    return f"triton: {kernels} kernels for sm_{precompile.CAPABILITY}, of use to Triton {triton} alone{late}"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
