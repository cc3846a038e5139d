"""`python -m eval all|accuracy|speed|report`: the command line of the harness.

Bad input ends with one line on stderr and exit code 2, Ctrl-C with one line that says what is kept
and exit code 130, a run in which some cell could not be made with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

from . import workers
from .machine import Problem, one_line
from .workers import Failed

COMMANDS = {
    "all": "accuracy, agreement, speed, then the report",
    "accuracy": "lm-eval tasks and agreement with the full cache, then the report",
    "speed": "prefill and decode times beside transformers' own caches, then the report",
    "offload": "the offloading experiments of document 001 (offload.json and figures)",
    "quant": "accuracy against true bits per value, and re-quantization drift (quant.json and figures)",
    "report": "tables, plots and the page from the results that --out holds",
}


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str):
        raise Problem(f"{message} (see python -m eval --help)")


def parser() -> Parser:
    """The arguments; everything has a default."""
    made = Parser(
        prog="python -m eval",
        description="Accuracy, agreement and speed of KV-cache methods.",
        epilog="commands: " + "; ".join(f"{name}: {text}" for name, text in COMMANDS.items()),
    )
    add = made.add_argument
    add("command", choices=list(COMMANDS), help="what to do")
    add("--model", help="folder or hub id (default: the embedded workshop model)")
    add("--methods", nargs="+", metavar="METHOD", help="for example: full int4 h2o:budget=0.2,recent=0.5")
    add("--tasks", nargs="+", metavar="TASK", help="local tasks, 'agreement', or lm-eval's own by name")
    add("--device", help="cpu, cuda, cuda:N (default: cuda where there is one)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on a CPU")
    add("--batch-size", type=count, default=64, help="rows decoded together (default: 64)")
    add("--limit", type=count, help="documents per task; also fewer repeats and contexts for speed")
    add("--num-fewshot", type=natural, help="shots, for tasks that do not fix them")
    add("--seed", type=natural, default=1234, help="of the choice of shots (default: 1234)")
    add("--suite", choices=["model", "wide", "attention"], default="model", help="speed: the model itself, "
        "1k to 16k tokens on a wider random-weight Llama, or decode attention alone")  # fmt: skip
    add("--jobs", type=natural, help="processes for accuracy (0: this one; default: 2 for a small model)")
    add("--experiments", nargs="+", metavar="NAME", help="offload: similarity, recall, sensitivity, latency, "
        "breakdown, link, pool, bandwidth, accuracy; quant: bits, drift (default: all)")  # fmt: skip
    add("--out", type=Path, help="folder for results (default: results/NAME)")
    return made


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if natural(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def split(words: list[str] | None, what: str) -> list[str] | None:
    """Separate what spaces or commas separate; `a:x=1,y=2,b` is `a:x=1,y=2` and `b`."""
    if words is None:
        return None
    found: list[str] = []
    for part in (part.strip() for word in words for part in word.split(",")):
        if found and "=" in part and ":" not in part and ":" in found[-1]:
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    if not found:
        raise Problem(f"--{what}: no {what[:-1]} is named")
    return list(dict.fromkeys(found))


def default_out(arguments) -> Path:
    """results/demo for the workshop model, results/NAME for another; --limit has a folder of its own."""
    own = arguments.command in ("offload", "quant")
    name = arguments.command if own else "bench" if arguments.suite == "wide" else "demo"
    if arguments.model and arguments.model != "workshop":
        name = re.sub(r"[^A-Za-z0-9.=_-]+", "_", arguments.model.strip("/").split("/")[-1]) or "model"
    return Path("results") / (f"{name}-limit{arguments.limit}" if arguments.limit else name)


def settings_of(arguments):
    """Checked settings; raises Problem or ValueError with one clear line."""
    methods = split(arguments.methods, "methods")
    tasks = split(arguments.tasks, "tasks")
    import kvlab
    from kvlab.methods import parse

    from . import run, taskset

    for method in methods or []:
        spec = parse(method)
        if spec.name in kvlab.METHODS:  # values that no model could take
            try:
                spec.method.policies(**spec.parameters)
            except (TypeError, ValueError) as error:
                raise Problem(f"method {method!r}: {error}") from error
    if arguments.command in ("all", "accuracy"):
        tasks = taskset.check(tasks or [*taskset.local_names(), taskset.AGREEMENT])
    settings = run.Settings(
        model=None if arguments.model == "workshop" else arguments.model,
        methods=tuple(methods or kvlab.FIRST_WAVE),
        tasks=tuple(tasks or ()),
        out=arguments.out or default_out(arguments),
        device=arguments.device,
        dtype=arguments.dtype,
        batch_size=arguments.batch_size,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        seed=arguments.seed,
        suite=arguments.suite,
        jobs=arguments.jobs,
    )
    run.check_device(settings)
    return settings


def work(arguments, command: str) -> int:
    """Do what was asked; returns the exit code."""
    if arguments.command in ("all", "accuracy") and arguments.jobs is None and arguments.model is None:
        workers.get_ready()
    from . import report
    from .results import Store, write_json
    from .show import Show

    if arguments.command == "report":
        out = arguments.out or default_out(arguments)
        if not any((out / "cells").glob("*.json")):
            raise Problem(f"--out {out}: there are no results in this folder; run python -m eval all first")
        show = Show(out)
        store = Store(out, show.line)
        store.prepare()
        report.write(store)
        return 0
    if arguments.command == "offload":
        return offload(arguments)
    if arguments.command == "quant":
        return quant(arguments)
    if arguments.suite == "attention":
        if arguments.command != "speed":
            raise Problem("--suite attention: this suite belongs to the command speed")
        from . import attention

        out = arguments.out or default_out(arguments)
        Store(out).prepare()
        attention.run(out, arguments.limit)
        return 0
    settings = settings_of(arguments)
    show = Show(settings.out)
    store = Store(settings.out, show.line)
    store.prepare()
    write_json(store.out / report.RUN, {"command": command})
    failed = 0
    if arguments.command in ("all", "accuracy"):
        from .run_accuracy import accuracy

        failed += accuracy(settings, store, show)
    if arguments.command in ("all", "speed"):
        from .run_speed import speed

        failed += speed(settings, store, show)
    report.write(store)
    return 1 if failed else 0


def offload(arguments) -> int:
    """Run the offloading experiments."""
    from . import offload, run
    from .show import Show

    names = split(arguments.experiments, "experiments") or list(offload.EXPERIMENTS)
    settings = offload.Settings(
        model=None if arguments.model == "workshop" else arguments.model,
        out=arguments.out or default_out(arguments),
        device=arguments.device,
        dtype=arguments.dtype,
        limit=arguments.limit,
    )
    run.check_device(settings)
    offload.run(names, settings, Show(settings.out).line)
    return 0


def quant(arguments) -> int:
    """Run the quantization experiments."""
    from . import quant, run
    from .show import Show

    names = split(arguments.experiments, "experiments") or list(quant.EXPERIMENTS)
    methods = split(arguments.methods, "methods") or quant.METHODS
    out = arguments.out or default_out(arguments)
    run.check_device(arguments)
    model = None if arguments.model == "workshop" else arguments.model
    line = Show(out).line
    quant.run(names, methods, model, out, arguments.device, arguments.dtype, arguments.limit, line)
    return 0


def main(words: list[str] | None = None) -> int:
    """Run the command; never raises for bad input or Ctrl-C."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out = None
    try:
        arguments = parser().parse_args(words)
        out = arguments.out or default_out(arguments)
        given = sys.argv[1:] if words is None else words
        return work(arguments, shlex.join(["python", "-m", "eval", *given]))
    except (ValueError, Failed) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads our output has seen enough; everything is stored
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        kept = len(list((out / "cells").glob("[!.]*.json"))) if out else 0
        print(
            f"interrupted: {kept} finished cells are kept in {out}; the same command resumes there",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
