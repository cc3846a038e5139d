"""Installed, the harness is kvlab_eval and answers to `kvlab eval`, whatever packages a user has."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval.core.digests import ROOT, code_digest

TEXT = shutil.ignore_patterns("__pycache__", "checkpoint", "checkpoint-opt", "data")
SCRIPT = """
import sys
from kvlab.cli import main
from kvlab_eval.core.digests import code_digest
from kvlab_course.harness import COMMAND, harness

print(code_digest(), COMMAND, harness("tasks.words").__name__)
try:
    main(["eval", "--help"])
except SystemExit:
    sys.exit(main(["eval", "report", "--out", "nowhere"]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The three packages as a wheel names them."""
    site = tmp_path_factory.mktemp("site")
    for name, there in (("kvlab", "kvlab"), ("eval", "kvlab_eval"), ("course", "kvlab_course")):
        shutil.copytree(ROOT / name, site / there, ignore=TEXT)
    return site


def test_kvlab_eval_is_the_harness(installed, tmp_path):
    """In a folder with packages of a user's own; and what is wrong is one line that names the command."""
    for name in ("eval", "course"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the wrong {name}')")
    environment, run = os.environ | {"PYTHONPATH": str(installed)}, [sys.executable, "-P", "-c", SCRIPT]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == f"{code_digest()} python -m kvlab_course kvlab_eval.tasks.words"
    assert "usage: kvlab eval" in done.stdout and "perplexity" in done.stdout
    assert done.returncode == 2
    assert done.stderr == (
        "error: --out nowhere: there are no results in this folder; run kvlab eval all first\n"
    )
