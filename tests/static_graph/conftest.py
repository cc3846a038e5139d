"""Exported graphs are shared by all tests of this folder, in a folder of their own."""

import os

import pytest


@pytest.fixture(autouse=True, scope="package")
def graphs(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(folder / "graphs"))
        yield folder / "graphs" / "static_graph"
