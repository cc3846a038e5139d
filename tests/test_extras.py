"""Extras: without one, every command that needs it says so in one line, and the others do without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from course.kit import pack
from kvlab import extras

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Runs every command line in one process in which some modules are not installed.
SCRIPT = """
import contextlib, io, json, sys, traceback
gone, commands = json.loads(sys.argv[1])
for name in gone:
    sys.modules[name] = None
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

print(json.dumps([run(words.split()) for words in commands]))
"""
NEEDS = {  # {extra: commands that need it}
    "eval": (
        "eval all --limit 1", "eval accuracy --tasks piqa", "eval speed", "eval perplexity", "eval quant",
        "eval offload", "eval attention", "eval report --out .",
        "eval lm-eval run --model kvlab --tasks recall",
    ),
    "course": ("course text x.ipynb", "course slides", "course workshop"),
    "static-graph": ("eval static-graph", "ask --method padded:length=64 --context about.txt --question who"),
    "gguf": ("ask --model tiny.gguf --context about.txt --question who", "gate --model tiny.gguf"),
    "ray": ("eval accuracy --on ray",),
    "humaneval": ("eval accuracy --jobs 0 --tasks humaneval_local --confirm-run-unsafe-code --limit 1",),
}  # fmt: skip
ALWAYS = ("--version", "methods", "eval --help", "ask --context about.txt --question who --tokens 1")


@pytest.mark.parametrize("extra", NEEDS)
def test_a_command_names_the_extra_that_it_needs_in_one_line(extra, tmp_path):
    (tmp_path / "about.txt").write_text("Mia has a red cat.")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    given = json.dumps([extras.EXTRAS[extra], [*NEEDS[extra], *ALWAYS]])
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, given], cwd=tmp_path, env=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for command, (code, said) in zip(NEEDS[extra], results):
        assert f'pip install "kvlab[{extra}]"' in said and len(said.splitlines()) == 1, (command, said, code)
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


def test_the_core_is_small_and_dev_holds_what_make_installs():
    core = set(pack.wanted())
    assert core == {
        "torch", "transformers", "numpy", "safetensors", "tokenizers", "numba", "rich", "packaging", "psutil",
    }  # fmt: skip
    everything = set(pack.wanted("dev"))
    assert everything >= core | {
        "jupyterlab", "datasets", "lm-eval", "pandas", "matplotlib", "onnxruntime", "gguf", "pytest", "nbval",
        "build", "twine",
    }  # fmt: skip
    assert "ray" not in everything
    (whole,) = map(Requirement, OPTIONAL["all"])
    assert whole.extras == set(OPTIONAL) - {"all", "dev", "site"}


def test_a_notebook_shows_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(extras.Missing) as missing:
        extras.needs("json", "matplotlib")
    line = 'the package matplotlib is not installed: pip install "kvlab[course]"'
    assert missing.value._render_traceback_() == [line]
