"""Digests: twelve hex digits that say which code, model, method and data a number came from.

The code of a number is the module that makes it, the measurement that hands it out, and all that these
import (`modules.py`); a method's is its entry in the table of methods, the classes that the entry names, and
all that these import. So an edited keep makes the cells again of those methods that use it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import sysconfig
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from . import contents
from .errors import Problem
from .modules import OURS, ROOT, Root, bare, called, chains, named_by, reached, syntax, unknown

CALIBRATION = ROOT / "kvlab" / "workshop" / "calibration.txt"
LITERALS = (int, float, str, bytes, bool, tuple, type(None))  # values whose text says what they are


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
            total.update(syntax(path.read_text(encoding="utf-8"), path.name == "__init__.py"))
        elif path.stat().st_size <= contents.LARGE:
            total.update(path.read_bytes())
        else:
            total.update(contents.sha256(path).encode())
    return total.hexdigest()[:12]


@cache
def code_digest(*makers: str, root: Path = ROOT) -> str:
    """Of the modules that make a number, of all that they import of the project, and of the calibration
    text."""
    packages = {*OURS, *(maker.partition(".")[0] for maker in makers)}
    return digest([*reached(*makers, roots=[Root(root, packages)]).values(), CALIBRATION])


def method_digest(spec) -> str:
    """Of the code that a method's `Spec` stands for, kvlab's own or the user's: its entry, the classes that
    the entry names, and all that these import from the project or from beside themselves; and of the profile
    that it is given.

    Raises Problem for a user's module that loads what only a run can name.
    """
    from kvlab.finding import METHODS, PROFILED
    from kvlab.spec import parse

    profile = [digest([spec.parameters["profile"]])] if "profile" in spec.parameters else []
    if spec.name in METHODS | PROFILED:
        names, texts = _entry(spec.method.policies)
        for other in {**spec.method.parameters, **spec.parameters}.values():
            if isinstance(other, str) and other in METHODS:  # it stands on another method
                texts.append(method_digest(parse(other)))
        return _digest_of(spec.method.policies.__module__, names, texts + profile)
    module, _, name = spec.name.rpartition(".")  # `my_module.MyKeep`
    if reached(module, roots=roots_of(module)):
        return _digest_of(module, [spec.name], profile)
    return _digest_of(module, *_entry(getattr(sys.modules[module], name)))


@cache
def methods_digest() -> str:
    """Of all methods that kvlab has, for a study that uses some of them."""
    from kvlab.finding import METHODS

    entries = [_entry(m.policies) for m in METHODS.values() if m.policies.__module__ == "kvlab.methods"]
    names, texts = ([one for found in entries for one in found[part]] for part in (0, 1))
    return _digest_of("kvlab.methods", names, texts)


def _digest_of(module: str, names: list[str], texts: list[str]) -> str:
    """Of what dotted names lead to from the module of a method, and of pieces of code."""
    modules = reached(*names, roots=roots_of(module))
    for module, path in modules.items():
        if module.split(".")[0] not in OURS:
            _refuse_unknown(bare(path.read_text(encoding="utf-8")), str(path))
    total = hashlib.sha256(digest(modules.values()).encode())
    for text in texts:
        total.update(text.encode())
    return total.hexdigest()[:12]


def roots_of(module: str) -> list[Root]:
    """Where the code of a method's module may lie: the project, what is on sys.path and not installed, and
    the module's own package, installed or not; nothing else that is installed."""
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    places = [Path(place or ".").resolve() for place in sys.path]
    installed |= {place for place in places if place.name in ("site-packages", "dist-packages")}
    package = module.split(".")[0]
    top = getattr(sys.modules.get(package), "__file__", None)
    if top:
        places.append(Path(top).resolve().parents[Path(top).name == "__init__.py"])
    found = {}
    for place in (ROOT, *places):
        if not any(place.is_relative_to(one) for one in installed):
            found[place] = Root(place)
        elif place == ROOT or (top and place == places[-1]):
            found[place] = Root(place, {*OURS, package})
    return [root for place, root in found.items() if place.is_dir()]


def _refuse_unknown(parsed: ast.AST, where: str) -> None:
    if call := unknown(parsed):
        raise Problem(
            f"{where}, line {call.lineno}: {called(call)} loads code that only a run can name, so a stored "
            "number would not know it; import it by its name"
        )


def _entry(policies) -> tuple[list[str], list[str]]:
    """(dotted names that a method's function or class leads to, pieces of code): of kvlab's own the function,
    of a user's its file, or the cells of a notebook that it stands on."""
    names, texts, waiting, seen = [], [], [policies], set()
    while waiting:
        one = waiting.pop()
        file, ours = _source_file(one), one.__module__.split(".")[0] == "kvlab"
        code = textwrap.dedent(inspect.getsource(one)) if ours else "".join(linecache.getlines(file))
        if code in seen:
            continue
        seen.add(code)
        parsed = bare(code)
        if not ours:
            _refuse_unknown(parsed, file)
        texts.append(ast.dump(parsed))
        names += named_by(one.__module__, Path(file), parsed)
        if Path(file).is_file() and not ours:
            continue
        known = dict(vars(sys.modules[one.__module__]))
        if inspect.isfunction(one):
            known |= inspect.getclosurevars(one).nonlocals
        used, alone = chains(parsed)
        for name in sorted({*used, *alone} & known.keys()):
            value = known[name]
            if inspect.ismodule(value):
                names += [f"{value.__name__}.{end}" for end in used.get(name, ())]
            elif isinstance(value, LITERALS):
                texts.append(f"{name} = {value!r}")
            elif not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            elif value.__module__ == "__main__":
                waiting.append(value)
            else:
                names.append(f"{value.__module__}.{value.__name__}")
    return names, texts


def _source_file(one) -> str:
    """The file, or the notebook's cell, that a function or a class was written in."""
    functions = [one] if inspect.isfunction(one) else filter(inspect.isfunction, vars(one).values())
    return next((inspect.unwrap(function).__code__.co_filename for function in functions), "")


@cache
def model_digest(name: str | None) -> str:
    """Of the contents of a model's folder (None: the embedded model); a hub id stands for itself."""
    from kvlab.models import EMBEDDED, source_of

    source = source_of(name)
    if source in EMBEDDED.values():  # the same bytes wherever kvlab is installed
        return digest([source])
    return contents.of_model(Path(source)) if Path(source).is_dir() else source
