"""What the wheel carries: recipes and tests stay in the clone."""

import runpy
import subprocess
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "command, tops",
    [
        ("bdist_wheel", {"kvlab", "kvlab_eval", "kvlab_course"}),
        ("editable_wheel", {"kvlab", "kvlab_eval", "kvlab_course", "eval", "course"}),
    ],
)
def test_the_wheel_carries_neither_recipes_nor_tests_nor_names_of_a_users_own(monkeypatch, command, tops):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["setup.py", command])
    told = {}
    monkeypatch.setattr(setuptools, "setup", lambda **settings: told.update(settings))
    runpy.run_path("setup.py")
    packages = told["packages"]
    assert {name.partition(".")[0] for name in packages} == tops
    assert {"kvlab_course.teaching.check", "kvlab_eval.tasks", "kvlab.store"} <= set(packages)
    assert told["package_dir"]["kvlab_eval.tasks"] == "eval/tasks"
    kept = [file for name in ("kvlab", "kvlab_eval", "kvlab_course") for file in told["package_data"][name]]
    assert {"tasks/*.yaml", "reproduce/*.toml", "teaching/check/key.z"} <= set(kept)


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
