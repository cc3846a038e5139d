"""Side: what both sides do with a document: prefill, compress, feed the question, score the answers.

Either side is a process of its own, told by a file what to do; this module needs nothing but torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def serve(load: Callable[[dict], Callable[[dict], object]]) -> None:
    """Read the job that the command line names, and write one file for each of its runs.

    A job has `documents`, each with `ids`, `cut` (tokens that are compressed), `choices` (token ids each) and
    `kept` (tokens that stay); `runs`, each with a `file`; and what `load` needs, which returns what makes a
    run's side: `prefill(ids, kept) -> cache`, `step(cache, token, place) -> logits [vocabulary]`,
    `size(cache) -> bytes`, `copy(cache)`, and `held(cache, ids, kept)`: the positions of the prompt that are
    held, by layer and head.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    start = load(job)
    for run in job["runs"]:
        try:
            side = start(run)
            answered(side, job["documents"][0])  # what is compiled or allocated once is not timed
            told = [answered(side, document) for document in job["documents"]]
            found = {"documents": told}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        file = Path(run["file"])
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.rename(file)


@torch.inference_mode()
def answered(side, document: dict) -> dict:
    """One document through one side: log-probability of every choice, what stayed, CPU seconds, bytes."""
    ids, cut = document["ids"], document["cut"]
    prompt, count = torch.tensor([ids[:cut]]), document["kept"]
    before = watch()
    began = time.process_time()
    cache = side.prefill(prompt, count)
    seconds, steps, size = time.process_time() - began, [], side.size(cache)
    for place in range(cut, len(ids)):
        began = time.process_time()
        logits = side.step(cache, ids[place], place)
        steps.append(time.process_time() - began)
    peak = peak_since(before)
    first, scores = logits.float().log_softmax(-1), []
    for choice in document["choices"]:
        score, mine = first[choice[0]].item(), side.copy(cache) if len(choice) > 1 else None
        for index in range(1, len(choice)):
            logits = side.step(mine, choice[index - 1], len(ids) + index - 1)
            score += logits.float().log_softmax(-1)[choice[index]].item()
        scores.append(score)
    held = side.held(cache, prompt, count)
    return {
        "scores": scores, "held": held, "bytes": size, "prefill": seconds, "step": median(steps), "peak": peak
    }  # fmt: skip


def watch() -> int | None:
    """Bytes that the process holds now, from where its peak is watched; None where no file says it."""
    try:
        FORGET.write_text("5")
        return memory("VmRSS")
    except OSError:
        return None


def peak_since(before: int | None) -> int | None:
    """Bytes that the process held at most since `watch`, beyond what it held then."""
    return None if before is None else max(0, memory("VmHWM") - before)


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
