"""Digests: twelve hex digits that say which code, model, method and data a number came from.

Code is known by its syntax tree, docstrings dropped, so that an edited comment keeps a cell and an edited
line does not. The code of a number is the module that makes it and every module of kvlab and eval that this
one imports, at its top or inside a function, and so on; OUTSIDE is what may never be among them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the packages kvlab and eval
OUTSIDE = (  # what cannot change a number: it shows, teaches, trains, or brings cells to disk
    "kvlab.plots", "kvlab.cli", "kvlab.doctor", "eval.report", "eval.__main__", "eval.core.measurement",
    "eval.core.results", "eval.core.show", "eval.core.workers", "course", "recipes",
)  # fmt: skip
CALIBRATION = ROOT / "kvlab" / "workshop" / "calibration.txt"
SMALL = 64 * 2**20  # bytes: files above this are known by name, size and time, not by content


def digest(paths: Iterable[Path | str]) -> str:
    """Of the names and contents of files; folders are walked, Python files are known by their syntax tree."""
    files: set[Path] = set()
    for path in map(Path, paths):
        files |= {p for p in path.rglob("*") if p.is_file()} if path.is_dir() else {path}
    total = hashlib.sha256()
    for path in sorted(files):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        total.update(path.name.encode())
        stat = path.stat()
        if path.suffix == ".py":
            total.update(syntax(path.read_text(encoding="utf-8")))
        elif stat.st_size <= SMALL:
            total.update(path.read_bytes())
        else:
            total.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return total.hexdigest()[:12]


@cache
def tree(source: str) -> ast.Module:
    """A module's syntax tree, without comments and docstrings."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                node.body = node.body[1:]
    return parsed


@cache
def syntax(source: str) -> bytes:
    """The same as bytes."""
    return ast.dump(tree(source)).encode()


@cache
def code_digest(*makers: str, root: Path = ROOT) -> str:
    """Of the modules that make a number, of all that they import of the project, and of the calibration
    text."""
    packages = {"kvlab", "eval", *(maker.partition(".")[0] for maker in makers)}
    return digest([*reached(*makers, root=root, packages=packages).values(), CALIBRATION])


def reached(*modules: str, root: Path = ROOT, packages: set[str] | None = None) -> dict[str, Path]:
    """{module: file} of these modules and all below `root` that they import, directly or not.

    packages: look no further than these; beside an installed kvlab stands all of torch.
    """
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = _file(name, root) if packages is None or name.partition(".")[0] in packages else None
        if path is None or name in found:
            continue
        found[name] = path
        waiting += imports(name, path)
        if "." in name:
            waiting.append(name.rpartition(".")[0])  # a package's own module runs before its modules
    return found


def imports(name: str, path: Path) -> list[str]:
    """All that a module may import, at its top or inside functions; `from a import b` counts as a and a.b."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = []
    for node in ast.walk(tree(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def _file(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split("."))
    package = path / "__init__.py"
    return (
        package
        if package.is_file()
        else path.with_suffix(".py")
        if path.with_suffix(".py").is_file()
        else None
    )


def method_digest(spec) -> str | None:
    """Of the user's code that a method's `Spec` names (`my_module.MyKeep`, or one entered with
    `kvlab.method`) and of what it imports from beside itself; None for kvlab's own methods."""
    from kvlab.methods import METHODS

    policies = spec.method.policies
    module = policies.__module__ if spec.name in METHODS else spec.name.rpartition(".")[0]
    if module.split(".")[0] == "kvlab":
        return None
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:  # entered in a notebook: the lines of its cell
        lines = linecache.getlines(inspect.getsourcefile(policies) or "")
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
    root = Path(path).resolve().parents[module.count(".") + (Path(path).name == "__init__.py")]
    return digest(reached(module, root=root).values() or [path])


@cache
def model_digest(name: str | None) -> str:
    """Of a model's folder (None: the embedded model); a hub id stands for itself."""
    from kvlab.models import source_of

    source = source_of(name)
    return digest([source]) if Path(source).is_dir() else source
