"""The files that set kvlab up say the same thing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from course.kit import pack

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = list(pack.wanted("dev").values())
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


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


def test_the_pinned_set_is_closed_and_consistent():
    """What the installed packages require is pinned too, inside the ranges they give."""
    from importlib import metadata

    for name, pin in PINS.items():
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # pinned for the reference set, absent from this environment
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                other = canonicalize_name(requirement.name)
                if other == "setuptools":
                    continue  # pip freeze leaves it out
                assert other in PINS, f"{name} needs {other}, which is not pinned"
                if metadata.version(name) == str(pin):
                    assert requirement.specifier.contains(PINS[other], prereleases=True)


def test_conda_environment_installs_the_same_set():
    assert ENVIRONMENT["name"] == "kvlab"
    python = next(d for d in ENVIRONMENT["dependencies"] if str(d).startswith("python="))
    assert Version(python.split("=")[1]) in SpecifierSet(PROJECT["requires-python"])
    assert python == "python=3.11"
    assert "pip" in ENVIRONMENT["dependencies"]
    pip = next(d["pip"] for d in ENVIRONMENT["dependencies"] if isinstance(d, dict))
    cpu = re.search(r"^CPU +:= (\S+)$", MAKEFILE, re.M)[1]
    assert pip == [f"--extra-index-url {cpu}", "-c constraints.txt", "-e .[dev]"]


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
