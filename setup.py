"""What a wheel holds. The names eval and course may be a user's own: in a wheel they are kvlab_eval and
kvlab_course. A checkout (an editable install) has both names of either."""

import sys

from setuptools import find_packages, setup

LEFT_OUT = ["course.instructor*", "course.exercises*", "course.recipes*"]  # for a clone
DATA = {
    "kvlab": [
        "py.typed", "bill/*.json", "gating/*.txt", "workshop/checkpoint/*", "workshop/checkpoint-opt/*",
        "workshop/*.txt", "workshop/*.md",
    ],
    "course": [
        "*.j2", "page/*.html", "page/*.css", "page/*.js", "page/*.wat", "reveal/*",
        "teaching/check/key.z", "teaching/*.json",
    ],
    "eval": ["tasks/*.yaml", "tasks/data/**", "report/*.j2", "reproduce/*.toml", "gpu/run.sh"],
}  # fmt: skip


def ours(name: str) -> str:
    return name if name.startswith("kvlab") else f"kvlab_{name}"


found = find_packages(include=["kvlab*", "eval*", "course*"], exclude=LEFT_OUT)
packages = {ours(name): name.replace(".", "/") for name in found}
if "editable_wheel" in sys.argv:
    packages |= {name: name.replace(".", "/") for name in found}
setup(
    packages=list(packages),
    package_dir=packages,
    package_data=DATA | {ours(name): files for name, files in DATA.items()},
)
