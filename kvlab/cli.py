"""The `kvlab` command: `doctor`, `fetch`, `methods`, `ask`, `bill`, `gate`, and `eval`, the harness."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
import warnings
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import errors, extras
from .harness import beside

THREADS = 1024  # of torch, which takes memory for each


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, exit code 2."""

    def error(self, message: str):
        print(f"kvlab: error: {errors.shown(message)} (see kvlab --help)", file=sys.stderr)
        raise SystemExit(2)


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine, or what the methods do on a model."""
    from . import doctor

    if arguments.method is not None:
        from . import trial

        return trial.run(arguments.method)
    if arguments.model is not None:
        return doctor.model(arguments.model)
    if arguments.workshop is not None:
        return doctor.run(beside("course", "kit.ready").workshop(arguments.workshop))
    return doctor.run(results=arguments.results)


def fetch(arguments: argparse.Namespace) -> int:
    """Download a well-known model to this machine."""
    from .models import fetch

    fetch(arguments.name, lambda line: print(line, flush=True))
    return 0


def methods(arguments: argparse.Namespace) -> int:
    """Print the table of named methods, by family, or explain one of them."""
    if arguments.name is not None:
        from .explain import explain

        for line in explain(arguments.name).split("\n"):
            print(textwrap.fill(line, 100, subsequent_indent="    ", break_on_hyphens=False))
        return 0
    from .finding import METHODS, PROFILED

    known = [*METHODS.values(), *PROFILED.values()]
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("parameters", no_wrap=True)
    table.add_column("what it does", ratio=1)
    for family in dict.fromkeys(method.family for method in known):
        table.add_section()
        table.add_row(f"[bold]{family}[/]")
        for method in known:
            if method.family == family:
                paper = f" [dim]{method.paper}.[/]" if method.paper else ""
                table.add_row(method.name, parameters(method), escape(method.summary) + paper)
    console = Console(emoji=False)
    with console.capture() as shown:  # printed below, so that `main` hears of a reader who has left
        console.print(table)
    print(shown.get(), end="")
    print("The papers: docs/sources.md.")
    print("Write a method as name:parameter=value, for example h2o:budget=0.2,recent=0.5")
    return 0


def ask(arguments: argparse.Namespace) -> int:
    """Print the answers of several methods, side by side."""
    import psutil

    from .ask import check, one_by_one, ready, warm
    from .make import load
    from .measure.host import cores
    from .parameters import text_of
    from .spec import parse

    if not os.path.exists(arguments.context):  # False for a long text, too, where Path would raise
        raise ValueError(
            f"--context takes a file: {errors.shown(arguments.context)}: No such file or directory"
        )
    context, methods = text_of(arguments.context), separated(arguments.method)
    check(context, arguments.question, arguments.protocol, arguments.chat, arguments.tokens)
    for method in methods:
        parse(method)
    step(f"ask: loading {arguments.model or 'the workshop model'}")
    model, tokenizer = load(arguments.model)
    begin = lambda method: ready(
        model, tokenizer, context, arguments.question, method, arguments.chat, arguments.tokens
    )
    for method in methods:  # refusals come now, not after the others have answered
        warm(*begin(method))
    answers = [
        one_by_one(*begin(method), tokenizer, arguments.protocol, arguments.tokens) for method in methods
    ]
    if psutil.getloadavg()[0] > cores():
        step("ask: other programs are busy on this machine, so times are longer than they would be alone")
    wide = max(map(len, methods))
    for number, question in enumerate(arguments.question, 1):
        print(f"\n{errors.shown(question)}", flush=True)
        for place, method in enumerate(methods):
            of = f", question {number} of {len(arguments.question)}" if len(arguments.question) > 1 else ""
            step(f"ask: {method} answers, {place + 1} of {len(methods)}{of}")
            answer = next(answers[place])
            if number == len(arguments.question):
                answers[place].close()  # its cache goes before the next method's comes
            text = errors.shown(" ".join(answer.text.split()))
            ended = len(answer.tokens) < arguments.tokens or answer.tokens[-1] in tokenizer.all_special_ids
            cut = "" if ended else f", cut off after {arguments.tokens} tokens (--tokens)"
            print(f"  {method:{wide}}  {text}\n  {'':{wide}}  [{answer.cost}{cut}]", flush=True)
    return 0


def step(line: str) -> None:
    """Say on stderr what begins now."""
    print(f"kvlab {line}", file=sys.stderr, flush=True)


def bill(arguments: argparse.Namespace) -> int:
    """Print the costs of a model on a device."""
    from .bill import bill, show
    from .bill.data import table

    methods = None if arguments.methods is None else separated(arguments.methods)
    given = arguments.model, arguments.device, arguments.context, arguments.users, arguments.price
    found = bill(*given, methods)
    print(found)
    named = {line.method.partition(":")[0] for line in found.lines}
    known = [one for technique in table("flags")["techniques"] for one in technique["methods"]]
    print(f"\n{show.elsewhere([one for one in known if one.partition(':')[0] in named])}")
    return 0


def gate(arguments: argparse.Namespace) -> int:
    """Print which caches are safe on a model."""
    import json
    from dataclasses import asdict

    import torch

    from .faster import lodger
    from .gating import INTERRUPTED, check, gate, show
    from .gating.room import Room
    from .make import load
    from .models import configuration
    from .parameters import check_whole, text_of
    from .scratch import check_target, written_whole

    text = None if arguments.text is None else text_of(arguments.text)
    methods = None if arguments.methods is None else separated(arguments.methods)
    size = arguments.memory, arguments.context, arguments.users
    check(methods, arguments.minutes, *size)
    if arguments.threads is not None:
        check_whole("threads", arguments.threads, 1, "threads", THREADS)
    written = [file for file in (arguments.json, arguments.html) if file is not None]
    if "" in written:
        raise ValueError("--json and --html take the name of a file")
    named = [Path(file).resolve() for file in (*written, arguments.text, arguments.model) if file is not None]
    for file in written:
        if named.count(Path(file).resolve()) > 1:
            raise ValueError(f"{file}: another option names this file as well, and would lose what is in it")
    Room.of(configuration(arguments.model), *size)
    for file in written:
        check_target(file)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    faster = "eager" if torch.cuda.is_available() or lodger() is None else "compiled"
    step(f"gate: loading {arguments.model or 'the workshop model'}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no warning needed here if a model decodes eagerly
        model, tokenizer = load(arguments.model, engine=faster)
        found = gate(
            model, tokenizer, methods, text=text, minutes=arguments.minutes, memory=arguments.memory,
            context=arguments.context, users=arguments.users, say=lambda line: step(f"gate: {line}"),
        )  # fmt: skip
    try:
        if arguments.json is not None:
            with written_whole(arguments.json) as part:
                part.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        if arguments.html is not None:
            with written_whole(arguments.html) as part:
                part.write_text(show.page(found), encoding="utf-8")
    finally:  # a full disk does not lose the table
        print(show.markdown(found) if arguments.markdown else found)
    if found.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    return 0


def separated(words: list[str]) -> list[str]:
    """The items between spaces or commas: `a:x=1,y=2,b` is `a:x=1,y=2` and `b`."""
    found: list[str] = []
    for part in ",".join(words).split(","):
        if found and "=" in part and ":" not in part and ":" in found[-1]:
            found[-1] += f",{part}"
        else:
            found.append(part.strip())
    return found


def parameters(method) -> str:
    """A method's parameters with their defaults, as they are written in its name."""
    return "\n".join(f"{name}={default}" for name, default in method.parameters.items())


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kvlab", description="A laboratory for the KV cache of a language model.")
    here = extras.version("kvlab") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"kvlab {here}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    command = commands.add_parser("doctor", help="check versions, memory, the built-in model")
    command.add_argument("--results", default="results", help="folder for results (results)")
    command.add_argument("--model", help="only list the methods that serve this model (a name or a folder)")
    told = "only try this method on a tiny model: h2o:budget=0.2, mine.MyKeep, my_cache.MyCache:bits=4"
    command.add_argument("--method", help=told)
    command.add_argument(
        "--workshop", nargs="?", const="", metavar="KIT",
        help="check what a classroom needs; with the folder of a kit also its set-up without a network",
    )  # fmt: skip
    command.set_defaults(run=doctor)

    command = commands.add_parser("fetch", help="download a model: smollm2")
    command.add_argument("name", help="smollm2: SmolLM2-135M-Instruct, 93 MB to download, 540 MB on disk")
    command.set_defaults(run=fetch)

    command = commands.add_parser("methods", help="list the named methods and their parameters")
    command.add_argument("name", nargs="?", help="explain one method and each of its parameters")
    command.set_defaults(run=methods)

    command = commands.add_parser("ask", help="show what several methods answer about a text, side by side")
    command.add_argument("--model", help="a name, a folder or a GGUF file (default: the workshop model)")
    command.add_argument("--context", required=True, metavar="FILE", help="file of the text to ask about")
    command.add_argument("--question", action="append", required=True, help="a question; repeat for more")
    command.add_argument(
        "--method", nargs="+", default=["full"], help="such as full,snapkv:budget=0.2 (default: full)"
    )
    command.add_argument(
        "--protocol",
        default="many-questions",
        help="many-questions, or question-inside: compress with the question (default: many-questions)",
    )
    command.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    command.add_argument(
        "--tokens", "--max-new-tokens", type=int, default=64, help="most tokens of an answer (default: 64)"
    )
    command.set_defaults(run=ask)

    command = commands.add_parser("bill", help="compute what a model costs on a device: bytes, time, money")
    command.add_argument(
        "--model",
        required=True,
        help="a released model's name, or a name, a folder or a GGUF file as for ask",
    )
    command.add_argument("--device", required=True, help="a device's name, such as 'RTX 4090'")
    command.add_argument(
        "--context", help="tokens per user, such as 32k (default: the model's trained length)"
    )
    command.add_argument("--users", type=int, default=1, help="users at once (default: 1)")
    command.add_argument("--price", type=float, help="price of the device per hour")
    command.add_argument("--methods", nargs="+", metavar="METHOD", help="such as full,h2o:budget=0.1 (all)")
    command.set_defaults(run=bill)

    command = commands.add_parser("gate", help="measure which caches are safe on a model, in minutes")
    command.add_argument("--model", help="a name, a folder or a GGUF file (default: the workshop model)")
    command.add_argument("--methods", nargs="+", metavar="METHOD", help="such as int8,h2o:budget=0.5")
    command.add_argument("--text", metavar="FILE", help="your own text instead of prose, code and facts")
    command.add_argument(
        "--minutes", type=float, default=10.0, help="start nothing new after this time (default: 10)"
    )
    command.add_argument("--memory", help="memory for weights and caches, such as 24GB")
    command.add_argument("--context", help="tokens per user, such as 32k")
    command.add_argument("--users", type=int, default=1, help="users at once (default: 1)")
    command.add_argument("--threads", type=int, help="threads of torch")
    command.add_argument("--json", metavar="FILE", help="also write all numbers")
    command.add_argument("--html", metavar="FILE", help="also write a page with a picture of the keys")
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    command.set_defaults(run=gate)

    commands.add_parser("eval", help="measure accuracy and speed, write a report", add_help=False)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: bad input or an unusable file, 130: Ctrl-C)."""
    words = sys.argv[1:] if argv is None else argv
    errors.print_anything()
    try:
        if words[:1] == ["eval"]:
            return beside("eval", "command").main(words[1:])
        arguments = build_parser().parse_args(words)
        sys.path.append(os.getcwd())  # where the user's own method may be
        code = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can still be shown
        return code
    except KeyboardInterrupt:
        print("kvlab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kvlab methods | head`
        drop_output()
        return 0
    except (ValueError, TypeError, RuntimeError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not extras.missing(error):
            raise
        if isinstance(error, OSError) and not error.filename:
            drop_output()
        print(f"kvlab: error: {said(error)}", file=sys.stderr)
        return 2


def said(error: Exception) -> str:
    """An error in one line; for an OSError, its file and the reason; for a missing package, what to
    install."""
    if line := extras.missing(error):
        return line
    if isinstance(error, OSError) and error.strerror:
        return errors.shown(f"{error.filename or 'standard output'}: {error.strerror}")
    return errors.first_line(error)


def drop_output() -> None:
    """Discard the rest of stdout, or Python would complain at the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
