"""Kept: my_cache.py, the file in which the learner's functions and their class MyCache are collected."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

FILE = "my_cache.py"
HEAD = f'''"""My cache: a part from each chapter of the course, written by mine.keep(...)."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch

import kvlab
from {__package__} import mine
from kvlab.keep import Keep

globals().update(mine.course())  # the course's parts, until yours stand below
'''


def grown(made: type) -> str:
    """The class MyCache of my_cache.py with the methods of this one in place of those of the same names."""
    text, nodes = read()
    old = next((node for node in nodes or [] if node.name == "MyCache"), None)
    parts = methods(ast.get_source_segment(text, old)) if old else {}
    parts |= methods(source(made))
    head = 'class MyCache(mine.Cache):\n    """A part from each chapter."""\n'
    return head + "".join(f"\n{method}\n" for method in parts.values())


def methods(source: str) -> dict[str, str]:
    """The methods of a class, by name, as they are written."""
    lines = source.splitlines()
    return {
        one.name: "\n".join(lines[one.lineno - 1 : one.end_lineno])
        for one in ast.parse(source).body[0].body
        if isinstance(one, ast.FunctionDef)
    }


def write(name: str, source: str) -> None:
    """Put a source into my_cache.py, in place of one of that name; the rest of the file stays as it is."""
    text, nodes = read()
    if nodes is None:
        os.replace(file(), file().with_name("my_cache.bak.py"))
        print(f"{FILE} was no Python any more; it is kept as my_cache.bak.py")
        text, nodes = HEAD, []
    lines, old = text.splitlines(), next((node for node in nodes if node.name == name), None)
    if old is None:
        lines += ["", "", *source.splitlines()]
    else:
        lines[old.lineno - 1 : old.end_lineno] = source.splitlines()
    new = file().with_suffix(".new")
    new.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    os.replace(new, file())


@contextmanager
def alone():
    """No other notebook of this folder writes meanwhile; a lock that was left behind is passed after 5 s."""
    lock = file().with_suffix(".lock")
    for _ in range(100):
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def file() -> Path:
    return Path.cwd() / FILE


def read() -> tuple[str, list | None]:
    """The text of my_cache.py and its functions and classes; where it is no Python, these words and None."""
    try:
        text = file().read_text(encoding="utf-8")
        nodes = ast.parse(text).body
    except OSError:
        return HEAD, []
    except (SyntaxError, ValueError):
        return "no Python", None
    return text, [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def saved(name: str) -> Callable | None:
    """A function from my_cache.py, or None."""
    text, nodes = read()
    if nodes is not None and name not in [node.name for node in nodes]:
        return None
    scope: dict = {}
    try:
        exec(compile(text, FILE, "exec"), scope)
    except Exception as error:  # a learner's file: whatever is wrong with it, the course's part serves
        print(f"{FILE} cannot be read ({type(error).__name__}): the course's {name} is used")
        return None
    return scope[name]


def source(made: Callable) -> str:
    """The source of a function or class from the cell that defined it, without the marks of a solution."""
    code = inspect.unwrap(
        made if inspect.isfunction(made) else next(filter(inspect.isfunction, vars(made).values()))
    )
    text = "".join(linecache.getlines(code.__code__.co_filename))
    node = next(
        one for one in ast.walk(ast.parse(plain(text))) if getattr(one, "name", None) == made.__name__
    )
    lines = plain(text).splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(line for line in lines if not line.strip().startswith("###")))


def plain(cell: str) -> str:
    """A cell without its magics, which are no Python."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in cell.splitlines())
