"""The `kvlab` command: `kvlab doctor` and `kvlab methods`. Runs start with `python -m eval`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from importlib import metadata

from rich import box
from rich.console import Console
from rich.table import Table


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, exit code 2."""

    def error(self, message: str):
        print(f"kvlab: error: {message} (see kvlab --help)", file=sys.stderr)
        raise SystemExit(2)


def version() -> str:
    """Version of the installed kvlab."""
    try:
        return metadata.version("kvlab")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine, or what the methods do on a model."""
    from . import doctor

    if arguments.model is not None:
        return doctor.model(arguments.model)
    if arguments.workshop is not None:
        return doctor.run(doctor.workshop(arguments.workshop))
    return doctor.run(results=arguments.results)


def methods(arguments: argparse.Namespace) -> int:
    """Print the table of named methods."""
    from .methods import METHODS

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("parameters", no_wrap=True)
    table.add_column("what it does", ratio=1)
    for name, method in METHODS.items():
        table.add_row(name, parameters(method), method.summary)
    console = Plain()
    console.print(table)
    console.print("Write a method as name:parameter=value, for example h2o:budget=0.2,recent=0.5")
    return 0


def parameters(method) -> str:
    """A method's parameters with their defaults, as they are written in its name."""
    return "\n".join(f"{name}={default}" for name, default in method.parameters.items())


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kvlab", description="A laboratory for the KV cache of a language model.")
    parser.add_argument("--version", action="version", version=f"kvlab {version()}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    command = commands.add_parser("doctor", help="check versions, memory, the built-in model")
    command.add_argument("--results", default="results", help="folder for results (results)")
    command.add_argument("--model", help="only say which methods serve this model (a name or a folder)")
    command.add_argument(
        "--workshop", nargs="?", const="", metavar="KIT",
        help="check what a classroom needs; with the folder of a kit also its set-up without a network",
    )  # fmt: skip
    command.set_defaults(run=doctor)

    command = commands.add_parser("methods", help="list the named methods and their parameters")
    command.set_defaults(run=methods)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: bad input or an unusable file, 130: Ctrl-C)."""
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can be told
        return code
    except KeyboardInterrupt:
        print("kvlab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kvlab methods | head`
        drop_output()
        return 0
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, OSError) and not error.filename:
            drop_output()
        print(f"kvlab: error: {first_line(error)}", file=sys.stderr)
        return 2


def first_line(error: Exception) -> str:
    """What a line says of an error; of an OSError, its file and the reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'standard output'}: {error.strerror}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def drop_output() -> None:
    """What stdout still holds goes nowhere, or Python would complain of it at the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Plain(Console):
    """A console that prints names as they are."""

    def __init__(self):
        super().__init__(markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Whoever reads has left: `main` knows what to do."""
        raise


if __name__ == "__main__":
    sys.exit(main())
