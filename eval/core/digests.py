"""Digests: twelve hex digits that say which code, model and data a number came from."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path

from .. import PACKAGE
from . import contents
from .errors import Problem

HARNESS = Path(__file__).resolve().parents[1]  # the harness: eval, or kvlab_eval where installed
ROOT = HARNESS.parent  # the folder that holds it and kvlab
LARGE = 64 * 2**20  # bytes of a file up to which its own bytes are digested, beyond it their checksum
MAKES = ("accuracy", "speed", "studies", "tasks")  # the harness's code that makes numbers; all of kvlab does


def syntax(source: str | bytes) -> bytes:
    """A piece of code without comments and docstrings, which change no number."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                node.body = node.body[1:]
    return ast.dump(parsed).encode()


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
        if path.suffix == ".py":
            total.update(syntax(path.read_bytes()))
        elif path.stat().st_size <= LARGE:
            total.update(path.read_bytes())
        else:
            total.update(contents.sha256(path).encode())
    return total.hexdigest()[:12]


@cache
def code_digest(harness: Path = HARNESS) -> str:
    """Of all code that makes numbers, wherever it is. An edit to any of it makes all numbers again."""
    kvlab = harness.parent / "kvlab"
    ours = digest([*kvlab.rglob("*.py"), kvlab / "workshop/calibration.txt"])
    rooms = digest(file for room in MAKES for file in (harness / room).rglob("*.py"))
    return hashlib.sha256(f"{ours} {rooms}".encode()).hexdigest()[:12]


def method_digest(spec) -> str | None:
    """Of what a method's `Spec` uses that is not kvlab's: classes of your own, and a profile; None where it
    uses nothing else. Problem where the source of such a class cannot be read."""
    named = [kind for name in (spec.name, *spec.parameters.values()) for kind in _own(name)]
    modules = {sys.modules.get(kind.__module__) for kind in named}
    files = {file for one in modules if (path := getattr(one, "__file__", None))
             for file in imported(Path(path), one.__package__ or "")}  # fmt: skip
    parts = [*map(_source, named), *(syntax(file.read_bytes()) for file in sorted(files))]
    if "profile" in spec.parameters:
        parts.append(digest([spec.parameters["profile"]]).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12] if parts else None


def _own(name) -> list:
    """What a text names that is not kvlab's: a class, `my_module.MyKeep`, and what it is made from, or the
    function of a method that was entered by `kvlab.method`."""
    from kvlab.finding import METHODS, OWN, PROFILED, find

    try:
        if not isinstance(name, str) or (found := find(name)).family != OWN:
            return []
    except ValueError:  # a word that names no method
        return []
    if name in METHODS | PROFILED:
        return [found.policies]
    module, _, attribute = name.rpartition(".")
    kinds = getattr(sys.modules[module], attribute).__mro__
    return [kind for kind in kinds if kind.__module__.split(".")[0] not in ("kvlab", "torch", "builtins")]


def _source(one) -> bytes:
    """The syntax of the file, or of the notebook's cell, that a class or a function is written in."""
    functions = [one] if inspect.isfunction(one) else filter(inspect.isfunction, vars(one).values())
    file = next((inspect.unwrap(function).__code__.co_filename for function in functions), "")
    if Path(file).is_file():
        linecache.checkcache(file)
    try:
        text = "".join(linecache.getlines(file)) or inspect.getsource(one)
    except (OSError, TypeError):
        raise Problem(
            f"the source of {one.__qualname__} cannot be read, so stored numbers could not name it"
        ) from None
    return syntax(text)


def imported(first: Path, package: str = "") -> set[Path]:
    """The user's own files that a Python file imports, and those that they import: none of the standard
    library, and of installed packages those of its own. package: the one that the file is in."""
    found, waiting = {first}, [(first, package)] if _parses(first) else []
    while waiting:
        file, within = waiting.pop()
        tree = ast.parse(file.read_bytes())
        names = _names_imported(tree, tuple(filter(None, within.split("."))))
        around = (accumulate(one.split("."), "{}.{}".format) for one in names)  # packages run, too
        for name in {*chain.from_iterable(around)}:
            top = name.partition(".")[0]
            if top != package.partition(".")[0] and not _users(_spec(top)):
                continue
            spec = _spec(name)
            path = Path(spec.origin) if spec and spec.has_location else first
            if path.suffix == ".py" and path not in found and _parses(path):
                found.add(path)
                waiting.append((path, spec.parent))
    return found - {first}


def _parses(file: Path) -> bool:
    """Whether a file is Python: one that is not may be imported, and caught."""
    try:
        return bool(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return False


def _spec(name: str):
    """Where Python would import a name from, found without running its packages; None where it cannot."""
    top, *parts = name.split(".")
    try:
        spec, upto = find_spec(top), top
        for part in parts:
            upto, inside = f"{upto}.{part}", spec and spec.submodule_search_locations
            spec = PathFinder.find_spec(upto, inside) if inside else None
    except (ImportError, ValueError, AttributeError):  # of one that was made in memory
        return None
    return spec


def _users(spec) -> bool:
    """Whether a module is neither installed nor of the standard library."""
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    files = [Path(one) for one in places if one and Path(one).is_absolute()]
    library = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return any(library not in file.parents and not installed & {*file.parts} for file in files)


def _names_imported(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Names that a file imports which may be modules, but not kvlab's; package: the one that it is in."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            whole = ".".join((*start, node.module) if node.module else start)
            names = [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name and name.split(".")[0] not in ("kvlab", PACKAGE))


@cache
def model_digest(name: str | None) -> str:
    """Of the contents of a model's folder (None: the embedded model); for a hub id, its commit."""
    from kvlab.models import EMBEDDED, source_of

    source = source_of(name)
    if source in EMBEDDED.values():  # the same bytes wherever kvlab is installed
        return digest([source])
    return contents.of_model(Path(source)) if Path(source).is_dir() else contents.on_hub(source)
