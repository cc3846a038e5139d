"""Prepared code: numba keeps it by the file that a function stands in, and looks at no other one."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KVLAB = Path(__file__).resolve().parents[2] / "kvlab"
INTO = {
    "fast/cpu.py": ["fast/lanes.py"],
    "fast/wide.py": ["fast/cpu.py", "fast/lanes.py"],
    "fast/block.py": ["fast/cpu.py", "fast/lanes.py", "fast/team.py"],
    "fast/layers.py": ["fast/closing.py", "fast/lanes.py", "fast/team.py"],
}  # a file with functions that are kept -> those whose functions are compiled into them


@pytest.mark.parametrize("file", INTO)
def test_a_file_names_the_text_of_what_is_compiled_into_it(file):
    """So its own text changes with theirs, and what was prepared from an older one is not used. Where this
    fails, put the line that it expects into the file."""
    named = "# Compiled into this: " + ", ".join(
        f"{part} {hashlib.sha256((KVLAB / part).read_bytes()).hexdigest()[:8]}" for part in INTO[file]
    )
    assert named in (KVLAB / file).read_text(encoding="utf-8").splitlines()


def test_no_other_file_is_compiled_into_one():
    """Files whose functions are kept import compiled functions from those alone that they name."""
    for path in sorted(KVLAB.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"@njit\(.*cache=True", text):
            continue
        found = {f"fast/{name}.py" for name in re.findall(r"^from \.(\w+) import", text, re.MULTILINE)}
        compiled = re.compile("^@(njit|intrinsic)", re.MULTILINE)
        numba = {part for part in found if compiled.search((KVLAB / part).read_text(encoding="utf-8"))}
        assert numba == set(INTO.get(path.relative_to(KVLAB).as_posix(), ())), path


PREPARES = """
import numpy as np
from kvlab.fast.cpu import merge

parts = np.random.default_rng(0).random((2, 3, 2, 10), np.float32)
out = np.empty((2, 2, 8), np.float32)
merge(parts, out, np.empty((2, 2, 0), np.float32), np.empty((2, 0), np.float32))
print(out.sum())
"""


def test_two_processes_that_prepare_at_once_do_not_harm_each_other(tmp_path):
    """Both compile into one empty folder; a third one finds what they left."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(KVLAB.parent)}
    start = lambda: subprocess.Popen(
        [sys.executable, "-c", PREPARES], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    at_once = [start(), start()]
    said = [process.communicate(timeout=600) for process in at_once]
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}
    said.append(start().communicate(timeout=600))
    assert len({out for out, _ in said}) == 1 and said[0][0].strip() and not any(err for _, err in said)
    assert kept and kept == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}
