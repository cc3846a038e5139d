"""Start: Ctrl-C while a command's packages are imported, which takes seconds, ends it without a traceback."""

import gc
import signal
from importlib import import_module


def kvlab() -> int:
    """The `kvlab` command; returns its exit code."""
    return run("kvlab.cli")


def run(module: str) -> int:
    """Import a module and call its `main`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    gc.freeze()  # Python, which ends, would look for garbage in all that was imported, for a second
    return code
