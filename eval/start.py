"""Start: Ctrl-C at any moment of a command, while its packages are imported too, is one line and code 130."""

import _thread
import gc
import os
import signal
import sys
import time
from importlib import import_module


def kvlab() -> int:
    """The `kvlab` command; returns its exit code."""
    return run("kvlab.cli")


def run(module: str) -> int:
    """Import a module and call its `main`; returns the exit code."""
    while_imported()
    if os.environ.get("COLUMNS") == "0":  # a terminal of unknown width: tables would have none
        del os.environ["COLUMNS"]
    main = import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done
    exec(
        ""
    )  # after a Ctrl-C in text that was executed (a dataclass), Python would end as if nobody caught it
    gc.freeze()  # Python, which ends, would look for garbage in all that was imported, for a second
    return code


def while_imported() -> None:
    """From now on Ctrl-C ends this process at once."""
    signal.signal(signal.SIGINT, _ends)
    sys.unraisablehook = _again


def _ends(*signal) -> None:
    try:
        os.write(2, b"interrupted: nothing was begun\n")
    finally:
        os._exit(130)


def _again(unraisable) -> None:
    """Where Python cannot raise an exception (in a finalizer, or in a callback of compiled code) it passes
    over it: a Ctrl-C is then sent once more."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _thread.start_new_thread(_in_a_moment, ())
    else:
        sys.__unraisablehook__(unraisable)


def _in_a_moment() -> None:
    time.sleep(0.05)  # until the main thread has left that place
    _thread.interrupt_main()
