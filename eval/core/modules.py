"""Modules: what code a number is made by: those that others reach by their imports, and their syntax trees.

Code is known by its syntax tree, docstrings dropped, so that an edited comment keeps a cell and an edited
line does not. A name that a package only passes on leads to the module that it comes from. The entries of the
table of methods (`@method("h2o")`), and what only they import, count for whoever uses them (`digests.py`).
"""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the packages kvlab and eval
OUTSIDE = (  # it shows, teaches or trains, and what makes numbers never imports it
    "kvlab.bill", "kvlab.plots", "kvlab.cli", "kvlab.doctor", "kvlab.tried", "eval.report", "eval.__main__",
    "eval.accuracy.passthrough", "eval.core.files", "eval.core.index", "eval.core.merge", "eval.core.results",
    "eval.core.show", "course",
)  # fmt: skip
APART = (  # the same, and what says where caches are, what went wrong, and what a number stands on
    *OUTSIDE, "kvlab.scratch", "eval.accuracy.clock", "eval.cluster", "eval.core.errors", "eval.core.alike",
    "eval.core.digests", "eval.core.machine", "eval.core.numbers", "eval.core.preload",
)  # fmt: skip
OURS = ("kvlab", "eval")  # packages whose own modules do nothing but pass names on
ENTRY = "method"  # the decorator whose functions are entries of kvlab's table of methods
BY_NAME = ("import_module", "__import__")  # calls that import what they are given
UNKNOWN = ("spec_from_file_location", "SourceFileLoader", "run_path", "run_module", "exec")


@cache
def bare(source: str) -> ast.Module:
    """A piece of code's syntax tree, without comments and docstrings."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                node.body = node.body[1:]
    return parsed


@cache
def tree(source: str, passes_on: bool = False) -> ast.Module:
    """The same of a whole module, without the entries of the table of methods and what only these import; of
    a package that `passes_on` names, also without what it imports for others, `__all__` and the like."""
    whole = bare(source)
    entries = [node for node in whole.body if _is_entry(node)]
    body = [node for node in whole.body if node not in entries and not (passes_on and _is_label(node))]
    used = _names(body)
    dropped = _names(entries) - used
    parsed = ast.Module([], [])
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            gone = [
                a
                for a in node.names
                if (passes_on and _bound(node, a) not in used) or _bound(node, a) in dropped
            ]
            if gone and len(gone) == len(node.names):
                continue
            if gone:
                node = ast.copy_location(copy.copy(node), node)
                node.names = [a for a in node.names if a not in gone]
        parsed.body.append(node)
    return parsed


def _names(nodes: list) -> set[str]:
    """The names that pieces of code use."""
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_entry(node) -> bool:
    """`@method("h2o")` above a function."""
    calls = (one for one in getattr(node, "decorator_list", ()) if isinstance(one, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id == ENTRY for call in calls)


def _is_label(node) -> bool:
    """`__all__ = ...`, `__version__ = ...`."""
    return isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets
    )


def _bound(node, alias: ast.alias) -> str:
    """The name that an import gives to what it brings."""
    return alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0])


@cache
def syntax(source: str, passes_on: bool = False) -> bytes:
    """`tree` as bytes."""
    return ast.dump(tree(source, passes_on)).encode()


@dataclass(frozen=True)
class Root:
    """A folder that holds packages; packages: of those, the only ones that count (None: all)."""

    folder: Path
    packages: Collection[str] | None = None

    def has(self, package: str) -> bool:
        return self.packages is None or package in self.packages


def reached(*names: str, roots: Iterable[Root] = (Root(ROOT),)) -> dict[str, Path]:
    """{module: file} of what these dotted names stand for and all below `roots` that it imports, directly or
    not, but for APART."""
    found: dict[str, Path] = {}
    waiting, roots, asked = list(names), tuple(roots), set()
    while waiting:
        name = waiting.pop()
        if name in asked:
            continue
        asked.add(name)
        modules, others = _modules(name, roots)
        waiting += others
        for module, path in modules:
            if module in found or any(module == one or module.startswith(f"{one}.") for one in APART):
                continue
            found[module] = path
            waiting += imports(module, path)
    return found


def _modules(name: str, roots: tuple[Root, ...]) -> tuple[list[tuple[str, Path]], list[str]]:
    """(The modules on the way of a dotted name, the names that it stands for besides): where a package passes
    something on, the name where it comes from; of a package itself, everything that it passes on."""
    parts, found = name.split("."), []
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        path = file_of(module, roots)
        if path is not None:
            found.append((module, path))
        elif not any(root.has(parts[0]) and root.folder.joinpath(*parts[:count]).is_dir() for root in roots):
            # it is no package without a file
            passed = _passed_on(*found[-1]).get(parts[count - 1]) if found else None
            return found, [".".join([passed, *parts[count:]])] if passed else []
    return found, list(_passed_on(*found[-1]).values()) if found else []


def _passed_on(package: str, path: Path) -> dict[str, str]:
    """{name: where it comes from} of what a package imports and does not use itself."""
    if path.name != "__init__.py":
        return {}
    return _bindings(package, path, path.read_text("utf-8"))


@cache
def _bindings(package: str, path: Path, source: str) -> dict[str, str]:
    return {bound: dotted for dotted, bound in _imported(package, path, bare(source))}


def imports(name: str, path: Path) -> list[str]:
    """Dotted names of all that a module may import, at its top or inside functions; of a module that it
    imports, the attributes that it uses."""
    return list(_imports(name, path, path.read_text(encoding="utf-8")))


@cache
def _imports(name: str, path: Path, source: str) -> tuple[str, ...]:
    ours = path.name == "__init__.py" and name.split(".")[0] in OURS
    return tuple(named_by(name, path, tree(source, ours)))


def named_by(name: str, path: Path, parsed: ast.AST) -> list[str]:
    """Dotted names that a piece of module `name` imports; see `imports`."""
    used, alone = chains(parsed)
    found = []
    for dotted, bound in _imported(name, path, parsed):
        ends = used.get(bound, set())
        found += [f"{dotted}.{end}" for end in ends]
        if bound in alone or not ends:
            found.append(dotted)
    for call in (node for node in ast.walk(parsed) if isinstance(node, ast.Call)):
        if called(call) in BY_NAME and call.args and isinstance(call.args[0], ast.Constant):
            wanted = str(call.args[0].value)
            level = len(wanted) - len(wanted.lstrip("."))
            found.append(_absolute(name, path, level, wanted.lstrip(".")))
    return found


def _imported(name: str, path: Path, parsed: ast.AST) -> list[tuple[str, str]]:
    """(dotted name of what is imported, name that it is given) of every import."""
    found = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found += [(a.name if a.asname else a.name.split(".")[0], _bound(node, a)) for a in node.names]
            found += [(a.name, a.name) for a in node.names if "." in a.name]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, path, node.level, node.module or "")
            found += [(base if a.name == "*" else f"{base}.{a.name}", _bound(node, a)) for a in node.names]
    return found


def _absolute(name: str, path: Path, level: int, module: str) -> str:
    """A name that is relative to module `name`, from the top."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    above = package[: len(package) + 1 - level] if level else []
    return ".".join([*above, *([module] if module else [])])


def chains(parsed: ast.AST) -> tuple[dict[str, set[str]], set[str]]:
    """({name: dotted attributes that are asked of it}, names that are used by themselves)."""
    used: dict[str, set[str]] = {}
    heads, inner = set(), set()
    for node in ast.walk(parsed):  # what is around comes first
        attributes, at = [], node
        while isinstance(at, ast.Attribute) and id(node) not in inner:
            attributes.append(at.attr)
            at = at.value
            inner.add(id(at))
        if attributes and isinstance(at, ast.Name):
            used.setdefault(at.id, set()).add(".".join(reversed(attributes)))
            heads.add(id(at))
    names = (node for node in ast.walk(parsed) if isinstance(node, ast.Name))
    return used, {node.id for node in names if id(node) not in heads}


def called(call: ast.Call) -> str:
    """The last word of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def file_of(name: str, roots: tuple[Root, ...]) -> Path | None:
    package = name.partition(".")[0]
    for root in (root for root in roots if root.has(package)):
        path = os.path.join(root.folder, *name.split("."))  # a Path takes five times as long
        for file in (os.path.join(path, "__init__.py"), f"{path}.py"):
            if os.path.isfile(file):
                return Path(file)
    return None


def unknown(parsed: ast.AST) -> ast.Call | None:
    """A call that loads code which only a run can name, if there is one."""
    for call in (node for node in ast.walk(parsed) if isinstance(node, ast.Call)):
        named = call.args and isinstance(call.args[0], ast.Constant)
        if called(call) in UNKNOWN or (called(call) in BY_NAME and not named):
            return call
    return None
