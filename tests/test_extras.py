"""Extras: without one, every command that needs it says so in one line, and the others do without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course.kit import pack
from kvlab import extras

ROOT = Path(__file__).resolve().parents[1]
# Runs command lines in processes in which some modules are not installed, each a fork of one that has kvlab.
SCRIPT = """
import contextlib, io, json, os, sys, traceback
from pathlib import Path
import torch, transformers
import kvlab
from kvlab.cli import main

def run(words):
    out = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(out):
        try:
            code = main(words) if words[0] != "course" else course(words[1:])
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
        except Exception:
            code = traceback.format_exc()
    return code, out.getvalue()

def course(words):
    from course.__main__ import main
    return main(words)

run("ask --context about.txt --question who --tokens 1".split())  # what all of them load
for extra, (gone, commands) in json.loads(sys.argv[1]).items():
    if os.fork():
        os.wait()
        continue
    assert set(gone) & set(sys.modules) <= {"PIL", "accelerate"}, extra  # which transformers imports
    sys.modules |= dict.fromkeys(gone)
    Path(f"{extra}.json").write_text(json.dumps([run(words.split()) for words in commands]))
    os._exit(0)  # to end in order would take torch two seconds
"""
NEEDS = {  # {extra: commands that need it}
    "eval": (
        "eval all --limit 1", "eval accuracy --tasks piqa", "eval speed", "eval perplexity",
        "eval report --out .",
        "eval lm-eval run --model kvlab --tasks recall",
    ),
    "course": ("course text x.ipynb", "course slides", "course workshop"),
    "static-graph": ("ask --method padded:length=64 --context about.txt --question who",),
    "gguf": ("ask --model tiny.gguf --context about.txt --question who", "gate --model tiny.gguf"),
    "ray": ("eval accuracy --on ray",),
    "humaneval": ("eval accuracy --jobs 0 --tasks humaneval_local --confirm-run-unsafe-code --limit 1",),
}  # fmt: skip
ALWAYS = ("--version", "methods", "eval --help", "ask --context about.txt --question who --tokens 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where every extra has a file of what the commands said without it."""
    here = tmp_path_factory.mktemp("extras")
    (here / "about.txt").write_text("Mia has a red cat.")
    (here / "tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    given = {extra: (extras.EXTRAS[extra], [*commands, *ALWAYS]) for extra, commands in NEEDS.items()}
    words = [sys.executable, "-P", "-c", SCRIPT, json.dumps(given)]
    subprocess.run(words, cwd=here, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return here


@pytest.mark.parametrize("extra", NEEDS)
def test_a_command_names_the_extra_that_it_needs_in_one_line(extra, folder):
    results = json.loads((folder / f"{extra}.json").read_text())
    for command, (code, said) in zip(NEEDS[extra], results):
        lines = [line for line in said.splitlines() if ": loading " not in line]
        assert f'pip install "kvlab[{extra}]"' in said and len(lines) == 1, (command, said, code)
        assert code not in (0, None)
    for command, (code, said) in zip(ALWAYS, results[len(NEEDS[extra]) :]):
        assert code in (0, None) and "Traceback" not in said, (command, said)


def test_the_table_of_modules_is_that_of_pyproject():
    """Each extra is there, and brings its modules' packages (two names differ)."""
    brought = {extra: {name.replace("-", "_") for name in pack.wanted(extra)} for extra in extras.EXTRAS}
    deeper = {"jupyterlab", "nbformat", "nbclient", "nbconvert", "onnx_ir"}  # what the named ones bring
    for extra, modules in extras.EXTRAS.items():
        if extra not in ("ruler", "longbench"):  # lm-eval's own
            named = {"PIL": "pillow"}
            assert {named.get(one, one) for one in modules} - deeper <= brought[extra], extra


def test_the_line_names_the_clone_where_kvlab_is_not_installed(monkeypatch):
    """No index has kvlab, so its name alone would be looked for in vain."""

    def none(name):
        raise extras.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "version", none)
    assert extras.line("pandas").endswith(f'pip install "{ROOT}[eval]"')
