"""A bench without a GPU."""

import pytest

from eval.gpu.bench import Bench


@pytest.fixture
def bench():
    return Bench(dry=True)
