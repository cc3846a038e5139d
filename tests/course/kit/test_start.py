"""The set-up of a kit meets bad machines: each gets one line that says what to do."""

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parents[3] / "course" / "kit"
PLAIN = os.environ["PATH"]


@pytest.fixture
def start():
    spec = importlib.util.spec_from_file_location("kit_start", KIT / "start.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """A kit in a folder whose name has a space and an umlaut; its start.py says what it was called with."""
    made = tmp_path / "Meine Übung"
    (made / "setup").mkdir(parents=True)
    shutil.copy(KIT / "start.sh", made)
    (made / "setup" / "start.py").write_text("import sys\nprint(sys.version_info[:2], sys.argv[1:])")
    return made


def shell(folder, *arguments, path=PLAIN, python=None):
    environment = {"PATH": path} | ({"PYTHON": str(python)} if python else {})
    return subprocess.run(
        ["/bin/sh", str(folder / "start.sh"), *arguments], capture_output=True, text=True, env=environment,
        cwd="/",
    )  # fmt: skip


def fake(folder, name, version):
    """A Python that only says its version, and is too old."""
    made = folder / name
    made.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "Python {version}";; *) exit 1;; esac\n')
    made.chmod(0o755)


def test_start_sh_finds_a_python_and_hands_on_what_it_was_told(folder):
    ran = shell(folder, "--set-up", "two words", python=sys.executable)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == f"{sys.version_info[:2]} ['--set-up', 'two words']"


@pytest.mark.parametrize("version", ["3.10.4", "2.7.18", None])
def test_an_old_python_or_none_gets_one_line(folder, tmp_path, version):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "head"):
        (tools / name).symlink_to(shutil.which(name))
    if version:
        fake(tools, "python3", version)
    ran = shell(folder, path=str(tools))
    assert ran.returncode == 1 and ran.stdout == "" and len(ran.stderr.splitlines()) == 1
    found = f"Python {version}" if version else "none"
    assert f"needs Python 3.11 or 3.12; found: {found}. Install" in ran.stderr


@pytest.fixture
def setup(start, tmp_path, monkeypatch):
    """The folder setup of a kit, whole, and start.py beside it."""
    made = tmp_path / "setup"
    made.mkdir()
    for name in start.NAMES:
        (made / name).write_text("1+a\n")
    start.wheel(made).touch()
    monkeypatch.setattr(start, "FOLDER", tmp_path)
    return made


@pytest.mark.parametrize("name", ["kvlab-1+a-py3-none-any.whl", "requirements-torch.txt", "version.txt"])
@pytest.mark.parametrize("option", ["--set-up", "--stick"])
def test_a_folder_that_lacks_a_file_is_told_before_anything_is_downloaded(start, setup, name, option):
    assert start.incomplete(setup) == ""
    (setup / name).unlink()
    with pytest.raises(SystemExit, match=re.escape(f"{name} is missing in the folder setup: unpack the")):
        start.main([option])
    assert not (setup.parent / ".venv").exists() and not (setup.parent / "start.log").exists()


def test_damage_is_seen(start, tmp_path):
    """As the environment's Python sees it: a file of kvlab that is gone, or not what was installed."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"whole").digest()).rstrip(b"=").decode()
    info = tmp_path / "kvlab-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlab\nVersion: 1\n")
    (info / "RECORD").write_text(f"kvlab/key.z,sha256={digest},5\nkvlab-1.dist-info/RECORD,,\n")
    (tmp_path / "kvlab").mkdir()
    for name in ("torch", "transformers", "jupyterlab", "matplotlib"):
        (tmp_path / f"{name}.py").touch()

    def asked():
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{start.DAMAGE}"
        return subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path).returncode

    assert asked() == 3
    (tmp_path / "kvlab" / "key.z").write_text("other")
    assert asked() == 3
    (tmp_path / "kvlab" / "key.z").write_text("whole")
    assert asked() == 0
    (tmp_path / "torch.py").unlink()
    assert asked() == 4


LACKS = "http://192.168.0.5:8000 has no matplotlib==3.11.2 for this"


@pytest.mark.parametrize("said, line", [
    ("ERROR: No matching distribution found for matplotlib==3.11.2", LACKS),
    ("ERROR: Cannot install matplotlib==3.11.2 because these package versions have conflicting dependencies."
     "\nERROR: ResolutionImpossible: for help visit https://pip.pypa.io/", LACKS),
    ("WARNING: Retrying after connection broken by 'NewConnectionError(Connection refused)': /\n",
     "(http://192.168.0.5:8000 does not answer)"),
])  # fmt: skip
def test_a_served_folder_without_a_wheel_or_that_is_gone_is_named(start, monkeypatch, said, line):
    """The room's server (docs/instructor_guide.md) is told to pip by variables alone."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "http://192.168.0.5:8000")
    assert line in start.explain(said)


def test_the_recipe_of_the_wheel_server(start, setup, monkeypatch):
    """docs/instructor_guide.md: pip takes all wheels from the instructor's laptop, torch's +cpu too."""
    wheels = setup / "served"
    wheels.mkdir()
    for name, version in (("torch", "2.13.0+cpu"), ("transformers", "5.23.0")):
        with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as file:
            info = f"{name}-{version}.dist-info"
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    (setup / "requirements-torch.txt").write_text(
        "--extra-index-url https://download.pytorch.org/whl/cpu\ntorch==2.13.0+cpu\n"
    )
    handler = partial(SimpleHTTPRequestHandler, directory=wheels)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}")
        into = ["install", "--target", str(setup / "into"), *start.source(setup)]
        start.pip(Path(sys.executable), *into, *start.torch(setup, False))
        start.pip(Path(sys.executable), *into, "transformers==5.23.0")
        with pytest.raises(SystemExit, match=r"http://127.0.0.1:\d+ has no numpy==2.4.6 for this machine"):
            start.pip(Path(sys.executable), *into, "numpy==2.4.6")
        server.shutdown()
    assert {"torch", "transformers"} <= {one.name.partition("-")[0] for one in (setup / "into").iterdir()}
