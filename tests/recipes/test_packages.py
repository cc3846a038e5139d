"""What the wheel carries: recipes and tests stay in the clone."""

import runpy
import subprocess
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("top", ["kvlab", "eval"])
def test_every_file_that_the_code_may_read_is_in_the_wheel(monkeypatch, top):
    """`pip install .` once left out the gate's prose: a clone has every file, so no other test misses one."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    patterns = runpy.run_path("setup.py")["DATA"][top]
    packed = {file for pattern in patterns for file in (ROOT / top).glob(pattern) if file.is_file()}
    packed |= {file for pattern in patterns if "**" in pattern for file in (ROOT / top).glob(f"{pattern}/*")}
    tracked = subprocess.run(["git", "ls-files", top], capture_output=True, text=True, check=True).stdout
    assert [name for name in tracked.split() if not name.endswith(".py") and ROOT / name not in packed] == []
