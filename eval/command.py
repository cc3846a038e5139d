"""`python -m eval COMMAND`: one sub-command per measurement, each with the options that it uses.

Bad input, and a file that cannot be read or written, end with one line on stderr and exit code 2; Ctrl-C and
SIGTERM with one line that says what is kept and exit codes 130 and 143; a run in which some cell could not be
made with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from kvlab import extras
from kvlab.errors import print_anything
from kvlab.parameters import check_file

from . import PROGRAM
from .accuracy.accuracy import Accuracy
from .accuracy.kept import FOLDER
from .core.digests import ROOT
from .core.errors import Failed, Problem, Terminated, one_line
from .core.files import address, write_json
from .core.measurement import Measurement, flag, option
from .core.merge import merge
from .core.progress import LOG, Show
from .core.results import RUN, Store
from .core.study import COMMAND, expanded, loaded, options, said
from .gpu.plan import Gpu
from .reproduce.studies import Reproduce
from .speed.speed import Speed
from .studies.measurements import Perplexity


@dataclass(kw_only=True)
class Report(Measurement):
    """Nothing is made: what the folder holds is shown again."""

    name = "report"
    about = "write tables, plots and the page from the results in --out"

    any_code: bool = flag("also show cells made by other code, marked")
    against: str = option(
        "method to compare the others with, or all for every pair of methods (default: full)",
        "full",
    )

    format: str = option(
        "also write report.tex with figures as PDF, report.md or report.pdf", "html",
        choices=["html", "latex", "markdown", "pdf"],
    )  # fmt: skip

    def check(self) -> None:
        if not Store(self.folder).files.names():
            raise Problem(
                f"--out {self.folder}: there are no results in this folder; run {PROGRAM} all first"
            )


@dataclass(kw_only=True)
class Merge(Measurement):
    """Nothing is made: cells of several folders are brought into one."""

    name = "merge"
    needs = ()
    about = "copy the cells of several folders into --out"

    folders: tuple[str, ...] = option(
        "folders of results, or their addresses", (), many=True, positional=True, metavar="FOLDER"
    )

    def check(self) -> None:
        if self.out is None:
            raise Problem("--out: name the folder to copy the cells to")
        for folder in self.folders:
            if not Store(address(folder)).files.names():
                raise Problem(f"{folder}: there are no cells in this folder")

    def run(self, store, show) -> int:
        new, total = merge([address(folder) for folder in self.folders], store, show.line)
        show.line(f"{new} cells came to {self.folder}, which holds {total}; see {PROGRAM} report --out")
        return 0


OUTPUT = (errno.ENOSPC, errno.EIO, errno.EBADF)  # errors of writing, which name no file
KINDS = (Accuracy, Speed, Perplexity, Gpu, Reproduce, Report, Merge)
REPORTERS = {  # modules whose `report(measurement, store, show, wanted)` shows what is stored
    Accuracy: ".report", Speed: ".report", Report: ".report", Perplexity: ".report.perplexity",
    Reproduce: ".reproduce.documents",
}  # fmt: skip
LM_EVAL = "lm-eval"  # the command that is another program's
COMMANDS = {"all": ("measure accuracy, agreement and speed, then write the report", (Accuracy, Speed))} | {
    kind.name: (kind.about, (kind,)) for kind in KINDS
}


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str):
        raise Problem(f"{message} (see {PROGRAM} --help)")


def parser() -> Parser:
    """A sub-command for each measurement, an option for each of its fields; everything has a default."""
    made = Parser(prog=PROGRAM, description="Measure accuracy, agreement and speed of KV-cache methods.")
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(LM_EVAL, help="run lm-eval's command line, which knows --model kvlab", add_help=False)
    for name, (about, kinds) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        for one in {field.name: field for kind in kinds for field in options(kind)}.values():
            how = dict(one.metadata)
            how |= {"nargs": "+"} if how.pop("many", False) else {}
            if how.pop("positional", False):
                command.add_argument(one.name, **how)
            else:
                spelled = [
                    f"--{one.name.replace('_', '-')}",
                    *(["--output-path"] if one.name == "out" else []),
                ]
                command.add_argument(*spelled, dest=one.name, default=one.default, **how)
        command.add_argument(
            "--config", metavar="FILE", help="these options in YAML or JSON, such as a run.json"
        )
    return made


def chosen(words: list[str] | None) -> list[Measurement]:
    """The measurements that a command line asks for, accuracy once for each protocol."""
    arguments = parser().parse_args(expanded(sys.argv[1:] if words is None else list(words)))
    _, kinds = COMMANDS[arguments.command]
    given = {name: tuple(split(v, name)) if isinstance(v, list) else v for name, v in vars(arguments).items()}
    given = loaded(given)
    protocols, made = given.get("protocol"), []
    for kind in kinds:
        for protocol in protocols if kind is Accuracy and isinstance(protocols, tuple) else [protocols]:
            how = given | {"protocol": protocol}
            made.append(kind(**{field.name: how[field.name] for field in options(kind)}))
    return made


def split(words: list[str], what: str) -> list[str]:
    """Separate what spaces or commas separate; `a:x=1,y=2,b` is `a:x=1,y=2` and `b`."""
    found: list[str] = []
    for part in (part.strip() for word in words for part in word.split(",")):
        if found and "=" in part and ":" not in part and ":" in found[-1]:
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    if not found:
        raise Problem(f"--{what}: no {what[:-1]} is named")
    return list(dict.fromkeys(found))


def work(measurements: list[Measurement], command: str) -> int:
    """Check, make what is missing, show; returns the exit code."""
    from kvlab.scratch import set_up

    set_up()
    kinds = tuple(dict.fromkeys(map(type, measurements)))
    options = said(next(name for name, (_, some) in COMMANDS.items() if some == kinds), measurements, command)
    shared = any(getattr(one, "tp", False) for one in measurements)
    if "TORCHELASTIC_RUN_ID" in os.environ and not shared and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise Problem("torchrun started several processes, each of which would make all cells: add --tp")
    last = measurements[-1]
    store = Store(last.folder, lambda line: show.line(line))
    show = Show(store.out, store.home.at(LOG))
    with show.waiting("reading options, tasks and their documents"):
        for measurement in measurements:
            extras.needs(*measurement.needs)
            measurement.check()
    if shared and int(os.environ.get("RANK", 0)):
        return follow(measurements, store, show)
    store.prepare()
    if not isinstance(last, Report | Merge):
        keep_earlier(store.out / RUN, options)
        write_json(store.out / RUN, options)
    try:
        failed = sum(measurement.run(store, show) for measurement in measurements)
        try:
            if type(last) in REPORTERS:
                wanted = [cell for measurement in measurements for cell in measurement.cells()]
                import_module(REPORTERS[type(last)], __package__).report(last, store, show, wanted)
            if sys.stdout is not None:
                sys.stdout.flush()  # now, while an error can be told
        except BrokenPipeError:  # whoever reads our output may leave meanwhile: everything is stored
            drop_rest()
    finally:
        store.publish()
    if shared:
        leave_together()
    return 1 if failed else 0


def keep_earlier(path: Path, options: dict) -> None:
    """Keep the run.json of an earlier, other run as run-1.json and so on: each is a study file."""
    try:
        check_file(path)
        other = json.loads(path.read_text(encoding="utf-8")) | {COMMAND: ""} != options | {COMMAND: ""}
    except FileNotFoundError:
        return
    except (ValueError, TypeError):  # damaged
        other = True
    if other:
        number = next(n for n in itertools.count(1) if not path.with_stem(f"{path.stem}-{n}").exists())
        path.replace(path.with_stem(f"{path.stem}-{number}"))


def follow(measurements: list[Measurement], store: Store, show: Show) -> int:
    """What all processes of torchrun but the first do: the same work, of which nothing is written or said, a
    cell that failed included: torchrun ends all processes with the first one that tells of a failure."""
    store.save = lambda cell: None
    show.console.quiet = True
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for one in measurements:
            if getattr(one, "tp", False):
                one.run(store, show)
    leave_together()
    return 0


def leave_together() -> None:
    """Wait until all have done their work: torchrun ends every process with the first that ends badly, be it
    while it leaves, and the first process has a report to write."""
    import torch

    if torch.distributed.is_initialized():  # not where every cell was there
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main(words: list[str] | None = None) -> int:
    """Run the command; never raises for bad input, a file that cannot be read or written, or a signal."""
    given = sys.argv[1:] if words is None else words
    theirs = given[:1] == [LM_EVAL]
    if not theirs:
        os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out = None
    print_anything()
    try:
        with terminable():
            working_directory_last()
            if theirs:
                from .accuracy import passthrough

                return passthrough.run(given[1:])
            measurements = chosen(words)
            out = measurements[-1].folder
            return work(measurements, f"{PROGRAM} {shlex.join(given)}".strip())
    except (ValueError, Failed) as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
            return 2  # the first process says it for all
        return ended(2, f"error: {one_line(error)}")
    except ImportError as error:  # lm-eval has one of its own for a package that is missing
        if not (line := extras.missing(error)):
            raise
        return ended(2, f"error: {line}")
    except OSError as error:
        drop_rest()
        what = "standard output: " if error.errno in OUTPUT and not error.filename else ""
        return ended(2, f"error: {what}{one_line(error)}")
    except Terminated:
        return ended(143, f"terminated: {kept(out)}")
    except KeyboardInterrupt:
        return ended(130, f"interrupted: {kept(out)}")


def ended(code: int, line: str) -> int:
    """Say the last line, if anybody listens; returns the exit code."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{line}\n")
    return code


def kept(out: Path | str | None) -> str:
    """What an interrupted run leaves behind."""
    if out is None:
        return "nothing was begun"
    cells = len(Store(out).files.names())
    files = Path(out).glob(f"{FOLDER}/*.jsonl") if isinstance(out, Path) else ()
    batches = sum(file.read_bytes().count(b"\n") for file in files)
    more = f", behind {batches} finished batches of documents" if batches else ""
    return f"{cells} finished cells are kept in {out}; the same command resumes there{more}"


def drop_rest() -> None:
    """What stdout still holds and cannot be written is dropped, or Python would complain of it at the end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated meanwhile."""

    def leave(*_) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: signals are another's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def working_directory_last() -> None:
    """A user's own modules are found in the working directory, behind all others: `python -m` looks into it
    first, a command that is installed not at all."""
    try:
        here = os.getcwd()
    except OSError:
        raise Problem("the working directory is gone; change to another one") from None
    if here != str(ROOT):
        sys.path[:] = [*(place for place in sys.path if place not in ("", here)), here]
