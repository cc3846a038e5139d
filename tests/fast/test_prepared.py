"""Prepared code: numba keeps it by the file that a function stands in, and looks at no other one."""

import hashlib
import re
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
