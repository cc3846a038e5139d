"""What the wheel carries: recipes and tests stay in the clone."""

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_carries_neither_recipes_nor_tests():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = find_packages(str(ROOT), **settings["tool"]["setuptools"]["packages"]["find"])
    assert {name.partition(".")[0] for name in packages} == {"kvlab", "eval", "course"}
    assert {"course.teaching.check", "eval.tasks", "kvlab.store"} <= set(packages)
