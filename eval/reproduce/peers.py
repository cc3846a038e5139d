"""The measurement `peers`: our methods beside those of kvpress (NVIDIA), on the same token ids, each side in
a process of its own (`sides.py`). A cell is one pair of a method and a press, on one task, asked one way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from .. import PACKAGE
from ..accuracy.boundaries import boundary, character, rule_of
from ..accuracy.protocols import FIRST, INSIDE
from ..core.digests import ROOT, digest, method_digest
from ..core.errors import Failed, Problem
from ..core.measurement import Cell, Collected, OnModel, count, option

ABOUT = "Our methods beside those of kvpress 0.5.5, on the same token ids with the same number of tokens held"
FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PAIRS = [{name: one.get(name, False if name == "eager" else None) for name in ("method", "press", "eager")}
         for one in FILE["pairs"]]  # fmt: skip
DIFFERS = {one["method"]: one["differs"] for one in FILE["pairs"] if "differs" in one}
RATIO = 0.8  # of the prompt, that kvpress is told to drop; it keeps int(T * (1 - RATIO)) of T tokens
DATA = Path(__file__).parents[1] / "tasks" / "data"
THERE = ROOT / ".venv-kvpress" / "bin" / "python"
TASKS = ("recall", "needle")
SIDES = ("ours", "theirs")


def written(press: dict | None) -> str:
    """{class: parameters} as one writes it in Python."""
    if press is None:
        return "no press"
    ((name, given),) = press.items()
    parts = [written(v) if isinstance(v, dict) else f"{k}={v}" for k, v in given.items()]
    return f"{name}({', '.join(parts)})"


@dataclass(kw_only=True)
class Peers(Collected, OnModel):
    """Pairs of a method and a press, on the same token ids, with as many tokens held on both sides."""

    name = home = "peers"
    about = "run our methods beside kvpress's on the same tokens (needs make peers)"
    threads = 1

    limit: int | None = option("number of documents per task (default: all)", type=count)
    tasks: tuple[str, ...] = option(f"{', '.join(TASKS)} (default: all)", (), many=True, metavar="TASK")

    @property
    def folder(self) -> Path | str:
        return self.out or Path("results") / self.home

    def check(self) -> None:
        super().check()
        for task in self.tasks:
            if task not in TASKS:
                raise Problem(f"--tasks {task}: expected one of {', '.join(TASKS)}")
        if self.device not in (None, "cpu") or self.dtype not in (None, "float32"):
            raise Problem("peers: both sides run in float32 on the CPU; leave --device and --dtype out")
        if not self.collect and not THERE.is_file():
            raise Problem("peers: kvpress has an environment of its own, which is missing; run make peers")

    def cells(self) -> list[Cell]:
        from kvlab.spec import parse

        found = []
        for task in self.tasks or TASKS:
            data = digest([DATA / f"{task}.jsonl"])
            for protocol in (FIRST, INSIDE):
                for pair in PAIRS:
                    code = method_digest(parse(pair["method"]))
                    settings = {"protocol": protocol, "data": data, "pair": pair, "ratio": RATIO}
                    config = self.configuration(method=code, threads=1, **settings)
                    found.append(Cell(self.model_name, pair["method"], f"peers:{task}:{protocol}", config))
        return found

    def label(self, cell: Cell) -> str:
        _, task, protocol = cell.task.split(":")
        return f"{cell.method} and {written(cell.config['pair']['press'])} on {task}, {protocol}"

    def result(self, found: dict) -> str:
        row = found["row"]
        return f"held alike {row['alike']:.4f}, log-probabilities apart {row['apart']:.2g}"

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        """Both sides do all pairs of a task in one process each, one after the other."""
        from kvlab.models import source_of

        model = str(source_of(self.model))
        for task in dict.fromkeys(cell.task for cell in cells):
            bar.at(task, 0)
            mine = [cell for cell in cells if cell.task == task]
            yield from self.pairs(mine, self.documents(model, *task.split(":")[1:]), model)

    def pairs(
        self, cells: list[Cell], documents: list[dict], model: str
    ) -> Iterator[tuple[Cell, dict | Failed]]:
        """These cells, all of one task."""
        began = time.perf_counter()
        both = [side(name, cells, documents, model) for name in SIDES]
        seconds = (time.perf_counter() - began) / len(cells)
        for cell, *pair in zip(cells, *both, strict=True):
            wrong = [f"{s}: {one['error']}" for s, one in zip(SIDES, pair, strict=True) if "error" in one]
            if wrong:
                yield cell, Failed("; ".join(wrong))
                continue
            row = compared(documents, *(one["documents"] for one in pair))
            press = written(cell.config["pair"]["press"])
            yield cell, {"device": "cpu", "seconds": seconds, "press": press, "row": row}

    def documents(self, model, task: str, protocol: str) -> list[dict]:
        """Token ids of a task's first documents, where each is cut, and how many tokens stay."""
        from transformers import AutoTokenizer

        tokenizer, found = AutoTokenizer.from_pretrained(model), []
        for line in (DATA / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[: self.limit]:
            row = json.loads(line)
            ids, cut = tokenizer(row["context"]).input_ids, None
            if protocol == FIRST:
                at = character(rule_of(task), task, row["context"], row)
                cut = boundary(tokenizer, row["context"], ids, at)
            cut = cut or len(ids) - 1  # the last token is fed through what was compressed
            choices = [tokenizer(f" {c}", add_special_tokens=False).input_ids for c in row["choices"]]
            kept = max(1, int(cut * (1 - RATIO)))
            found.append({"ids": ids, "cut": cut, "choices": choices, "label": row["label"], "kept": kept})
        return found


def side(name: str, cells: list[Cell], documents: list[dict], model: str) -> list[dict]:
    """What one side says of every cell's documents."""
    job = {"model": model, "documents": documents, "runs": [cell.config["pair"] for cell in cells]}
    given = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    given |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}  # what is freed leaves the process
    with tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder) / "job.json", Path(folder) / "found.json"
        file.write_text(json.dumps(job | {"found": str(found), "ratio": RATIO}))
        python = str(THERE) if name == "theirs" else sys.executable
        command = [python, "-m", f"{PACKAGE}.reproduce.sides", name, str(file)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | given, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise Problem(f"peers: {name} ended: {last[0]}")
        return json.loads(found.read_text(encoding="utf-8"))


def compared(documents: list[dict], ours: list[dict], theirs: list[dict]) -> dict:
    """What two sides say of the same documents.

    alike: tokens that both sides hold, as a share of those that either holds, mean over layers and heads;
    same_heads: share of the heads that hold the same; but_newest: of those where ours holds nothing besides
    but the newest token. apart: distance of the log-probabilities of the choices, mean. Of either side:
    `held` tokens a head, CPU seconds of the `prefill` with its compression and of a `step`, `bytes` of the
    cache when the prompt has ended, `peak` bytes that the process grew by, medians over the documents.
    """
    pairs = list(zip(ours, theirs, strict=True))
    heads = [
        (set(mine), set(other), d["cut"] - 1)
        for a, b, d in zip(ours, theirs, documents, strict=True)
        for layers in zip(a["held"], b["held"], strict=True)
        for mine, other in zip(*layers, strict=True)
    ]
    gaps = [abs(x - y) for a, b in pairs for x, y in zip(a["scores"], b["scores"], strict=True)]
    best = lambda one: one["scores"].index(max(one["scores"]))
    found = {
        "n": len(documents),
        "tokens": round(mean(d["cut"] for d in documents)),
        "kept": round(mean(d["kept"] for d in documents), 1),
        "alike": mean(len(x & y) / len(x | y) for x, y, _ in heads),
        "same_heads": mean(x == y for x, y, _ in heads),
        "but_newest": mean(x - y <= {newest} for x, y, newest in heads),
        "apart": mean(gaps),
        "most_apart": max(gaps),
        "same_answer": mean(best(a) == best(b) for a, b in pairs),
    }
    for name, some in zip(SIDES, (ours, theirs), strict=True):
        right = [int(best(one) == d["label"]) for one, d in zip(some, documents, strict=True)]
        found[name] = {
            "outcomes": "".join(map(str, right)),
            "value": mean(right),
            "held": mean(len(head) for one in some for layer in one["held"] for head in layer),
            **{key: median(one[key] for one in some) for key in ("prefill", "step", "bytes")},
            "peak": None if any(one["peak"] is None for one in some) else median(o["peak"] for o in some),
        }
    return found


def named_rows(cells) -> Iterator[tuple[dict, dict]]:
    """(stored cell of `python -m eval peers`, its row without provenance), pair by pair."""
    for cell in sorted(cells, key=lambda cell: (cell["model"], cell["task"])):
        _, task, protocol = cell["task"].split(":")
        named = {"model": cell["model"], "task": task, "protocol": protocol, "method": cell["method"]}
        yield cell, named | {"press": cell["press"]} | cell["row"]
