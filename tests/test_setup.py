"""The files that set kvlab up say the same thing."""

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

from course.kit import pack

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = list(pack.wanted("dev").values())


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = Version(version)
    return found


PINS = pins()


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda r: r.name)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement):
    name = canonicalize_name(requirement.name)
    assert name in PINS, f"{requirement.name} is missing from constraints.txt"
    assert requirement.specifier, f"{requirement.name} has no range in pyproject.toml"
    assert PINS[name] in requirement.specifier


def test_the_pins_hold_no_cuda_package_and_no_local_version():
    assert not [name for name in PINS if name.startswith(("nvidia", "cuda", "triton"))]
    assert not [name for name, version in PINS.items() if version.local]


def test_versions_agree():
    import kvlab

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert getattr(kvlab, "__version__", PROJECT["version"]) == PROJECT["version"]


def test_the_entry_points_lead_somewhere():
    import importlib

    targets = [
        *PROJECT["scripts"].values(),
        *PROJECT["entry-points"]["lm_eval.models"].values(),
    ]
    for target in targets:
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))
