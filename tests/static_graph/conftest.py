"""Exported graphs are shared by all tests of this folder, in a folder of their own."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def graphs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("KVLAB_CACHE", str(folder))
        yield folder / "static_graph"
