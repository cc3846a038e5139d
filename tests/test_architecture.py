"""The arrows of docs/architecture.md: imports run one way."""

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from kvlab.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvlab", "eval", "course")
BELOW = {"kvlab": (), "eval": ("kvlab",), "course": ("kvlab", "eval")}


@cache
def modules() -> dict[str, Path]:
    """{dotted name: file} of every module."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = file
    return found


@cache
def tree(name: str) -> ast.Module:
    """A module's syntax."""
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imported(name: str, file: Path, node) -> list[str]:
    """The modules of ours that an import statement of module `name` names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        if node.level:
            here = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
            base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
        names = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules() else base for a in node.names]
    return [n for n in names if n in modules() and n != name]


@cache
def imports() -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """({module: modules it imports when it is loaded}, pairs that import inside a function)."""
    early, late = defaultdict(set), set()
    for name, file in modules().items():
        inside = set()
        for function in ast.walk(tree(name)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inside.update(map(id, ast.walk(function)))
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target in imported(name, file, node):
                    late.add((name, target)) if id(node) in inside else early[name].add(target)
    return early, late


def room(name: str) -> str:
    """The folder of a package that a module is in, or the module itself."""
    return ".".join(name.split(".")[:2])


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """A way that ends where it began, if there is one."""
    done, path = set(), []

    def visit(at: str) -> list[str]:
        if at in path:
            return [*path[path.index(at) :], at]
        if at in done:
            return []
        path.append(at)
        for to in sorted(arrows.get(at, ())):
            if found := visit(to):
                return found
        path.pop()
        done.add(at)
        return []

    for start in sorted(arrows):
        if found := visit(start):
            return found
    return []


def test_modules_import_one_way():
    """Inside functions, too, but for the seam to speed, which does without what it asks for."""
    early, late = imports()
    arrows = {name: set(targets) for name, targets in early.items()}
    for name, target in late:
        if name != "kvlab.faster":
            arrows.setdefault(name, set()).add(target)
    assert circle(arrows) == []


def test_rooms_import_one_way():
    rooms = defaultdict(set)
    for name, targets in imports()[0].items():
        rooms[room(name)].update(room(target) for target in targets if room(target) != room(name))
    assert circle(rooms) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_lies_below(package):
    early, late = imports()
    arrows = {(name, target) for name, targets in early.items() for target in targets} | late
    tops = {target.split(".")[0] for name, target in arrows if name.split(".")[0] == package}
    assert tops - {package} <= set(BELOW[package])


HEAVY = (  # what `import kvlab` leaves to whoever needs it
    "transformers", "tokenizers", "safetensors", "huggingface_hub", "numba", "rich", "triton",
    "torch._dynamo", "torch._inductor", *(one for modules in EXTRAS.values() for one in modules),
)  # fmt: skip


def test_kvlab_brings_torch_alone():
    """A bad command line is answered before the modelling code, or even the cache's base class, is loaded."""
    script = "import sys, torch; before = {*sys.modules}; import kvlab; print(*{*sys.modules} - before)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {*done.stdout.split()} & {*HEAVY}


def test_a_store_imports_no_keep_and_a_method_of_one_kind_no_other():
    for name, targets in imports()[0].items():
        kinds = {"kvlab.keep", "kvlab.store", "kvlab.place"}
        if room(name) in kinds:
            others = {room(target) for target in targets} & kinds - {room(name)}
            assert others <= ({"kvlab.store"} if room(name) == "kvlab.place" else set()), name


def test_speed_is_a_lodger():
    """In kvlab only the seam asks for compiled code, inside its functions; only studies of it do beside."""
    early, late = imports()
    arrows = {(name, target) for name, targets in early.items() for target in targets} | late
    asks = {name for name, target in arrows if room(target) == "kvlab.fast" and room(name) != "kvlab.fast"}
    assert {name for name in asks if not name.startswith("eval.")} == {"kvlab.faster"}
    assert not any(room(target) == "kvlab.fast" for target in early["kvlab.faster"])
