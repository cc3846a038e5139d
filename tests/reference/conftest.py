"""Exported graphs and calibrations go to a folder of their own."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(tmp_path_factory.mktemp("reference")))
        yield
