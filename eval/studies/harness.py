"""The harness beside lm-eval's own model: documents per second of methods, in turns, in one process."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import kvlab
from kvlab.faster import engine_of
from kvlab.models import source_of

from ..accuracy import KVLabLM, taskset
from ..accuracy.arguments import BATCH
from ..core.machine import commit, machine, versions

METHODS = ("full", "int8", "int4", "h2o", "snapkv", "topk", "kvzip")
FEW = 8  # rows at once that HFLM is given, too: it pads every request to its batch's longest


def compare(
    model: str | None,
    tasks: dict,
    limit: int,
    batch_size: int,
    rounds: int,
    methods: tuple[str, ...] = METHODS,
) -> Iterator[dict]:
    """A row per task: documents per CPU second of HFLM, of `full` with the eager engine and of every method
    with the compiled one, the best of `rounds` turns. tasks: name -> lm-eval task. All score the first
    `limit` documents with one thread, `batch_size` rows at once; HFLM with `FEW` as well, and the faster of
    its two is what all are held against."""
    torch.set_num_threads(1)
    tokenizer = kvlab.load(model, device="cpu")[1]
    loaded = {engine: kvlab.load(model, device="cpu", engine=engine)[0] for engine in ("eager", "compiled")}
    own = AutoModelForCausalLM.from_pretrained(str(source_of(model)), dtype=torch.float32)
    theirs = {
        f"HFLM, {rows} rows": HFLM(pretrained=own, tokenizer=tokenizer, batch_size=rows, device="cpu")
        for rows in sorted({FEW, batch_size})
    }
    ways = {f"{method}, compiled": (method, "compiled") for method in methods}
    ways = dict.fromkeys(theirs) | {"full, eager": ("full", "eager")} | ways
    for name, task in tasks.items():

        def answer(who: str, task=task, name=name) -> int:
            lm = theirs.get(who)
            if lm is None:  # a new one: it remembers what it has answered
                method, engine = ways[who]
                lm = KVLabLM(loaded[engine], method, tokenizer=tokenizer, batch_size=batch_size)
            with contextlib.redirect_stdout(io.StringIO()):
                found = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
            return len(found["samples"][name])

        seconds, documents = {who: [] for who in ways}, answer("full, eager")
        for _ in range(rounds):
            for who, taken in seconds.items():
                start = time.process_time()
                answer(who)
                taken.append(time.process_time() - start)
        speed = {who: documents / min(taken) for who, taken in seconds.items()}
        best = max(speed[who] for who in theirs)
        yield {
            "task": name,
            "documents": documents,
            "documents_per_second": speed,
            "over_hflm": {who: speed[who] / best for who in ways if ways[who]},
            "cpu_seconds": seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.studies.harness", description=__doc__)
    parser.add_argument("--model", help="as for python -m eval (default: the embedded workshop model)")
    parser.add_argument("--tasks", nargs="+", default=["recall", "cloze", "prose", "recall_em"])
    parser.add_argument("--data", nargs="+", default=[], metavar="TASK=FILE.jsonl", help="rows of a task")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--limit", type=int, default=8, help="documents of each task (default: 8)")
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, the quickest counts")
    parser.add_argument("--out", type=Path, default=Path("docs/results/harness.json"))
    chosen = parser.parse_args()
    sources = taskset.Sources(data=tuple(tuple(pair.split("=", 1)) for pair in chosen.data))
    tasks = {name: taskset.prepared(name, 0, 1234, sources) for name in chosen.tasks}
    about = {
        "model": chosen.model or "workshop",
        "batch_size": chosen.batch_size,
        "protocol": "question-inside",
        "engine": engine_of(kvlab.load(chosen.model, device="cpu", engine="compiled")[0], chosen.batch_size),
    }
    made = {"machine": machine("cpu", 1), "simd": torch.backends.cpu.get_cpu_capability()}
    made |= {"versions": versions(), "commit": commit()}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in compare(chosen.model, tasks, chosen.limit, chosen.batch_size, chosen.rounds, chosen.methods):
        rows.append(row)  # written at once: what is measured is kept
        chosen.out.write_text(json.dumps(about | made | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
        for who, share in row["over_hflm"].items():
            print(f"{row['task']:16} {who:18} {share:.2f} of HFLM's documents per second", flush=True)


if __name__ == "__main__":
    main()
