"""The mark of tests that need Triton: `make test-triton` brings it, and runs those alone."""

import importlib.util

import pytest

WHY = "needs triton (pip install triton), which torch's CPU build leaves out"
HERE = importlib.util.find_spec("triton") is not None


def needs_triton(test):
    return pytest.mark.triton(pytest.mark.skipif(not HERE, reason=WHY)(test))
