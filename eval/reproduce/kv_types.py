"""Types: the cost of llama.cpp's own types of K and V, beside ours: one GGUF file, the gate's tokens.

`python -m eval.reproduce.kv_types --model FILE.gguf --name NAME` writes docs/results/llama/NAME.json. It
needs llama.cpp as docs/performance.md at commit eeeb4001 builds it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor

import kvlab
from kvlab.gating.formats import decoded, divergence
from kvlab.gating.gate import DECODED, PIECES, PROMPT, made
from kvlab.gating.reading import Reading
from kvlab.gating.texts import rows
from kvlab.models import ModelShape

from ..core.digests import ROOT
from ..core.files import write_file
from . import llama

TYPES = [("f16", True), *[(kind, turned) for kind in ("q8_0", "q5_0", "q4_0") for turned in (True, False)]]
OURS = [f"int{bits}:{turned}group=32" for bits in (8, 5, 4) for turned in ("", "rotate=true,")]
UNTURNED = "LLAMA_ATTN_ROT_DISABLE"  # without llama.cpp's rotation, which it applies to quantized types


def said(model: llama.Model, shape: ModelShape, ids: Tensor, kind: str) -> list[Tensor]:
    """Log-probabilities `[rows, vocabulary]` after each of the `DECODED` last tokens of `[rows, tokens]`."""
    found = []
    for row in ids:
        run = llama.Context(model, shape, kind, True, len(row), torch.get_num_threads())
        run.feed(row[None, :PROMPT])
        found.append([run.feed(row[None, at : at + 1]).log_softmax(-1) for at in range(PROMPT, len(row))])
        run.close()
    return [torch.stack(after) for after in zip(*found, strict=True)]


@torch.no_grad()
def ours(reading: Reading, method: str, rest: Tensor) -> list[Tensor]:
    """The same of kvlab under a method."""
    stepper = reading.taken(method)
    return [stepper.feed(rest[:, at : at + 1], last=True).log_softmax(-1) for at in range(rest.shape[1])]


def perplexity(said: list[Tensor], rest: Tensor) -> float:
    """Of the tokens that follow those of `rest` `[rows, tokens]`, all but the first of each row."""
    right = [one.gather(1, rest[:, at, None]) for at, one in enumerate(said[:-1], 1)]
    return float(torch.stack(right).double().mean().neg().exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--name", required=True, help="of the file that is written")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model, tokenizer = kvlab.load(str(asked.model), engine="eager")
    ids = rows(tokenizer, PROMPT + DECODED, PIECES)
    reading, rest, lines = Reading.of(model, ids[:, :PROMPT]), ids[:, PROMPT:], []
    full = decoded(reading, rest, print)

    def add(names: dict, now: list[Tensor], against: dict[str, list[Tensor]]) -> None:
        for name, right in against.items():
            lines.append(names | {"against": name} | divergence(now, right))
            lines[-1]["perplexity"] = perplexity(now, rest)
        print(names, lines[-1]["nats"], lines[-1]["perplexity"], flush=True)

    add({"method": "full"}, full, {"kvlab's full": full})
    for method in OURS:
        add({"method": method}, ours(reading, method, rest), {"kvlab's full": full})
    shape, theirs, before = ModelShape.of(model), llama.Model(asked.model), None
    for kind, turned in TYPES:
        os.environ[UNTURNED] = "0" if turned else "1"
        now = said(theirs, shape, ids, kind)
        before = before or now  # the first is f16
        add({"type": kind, "turned": turned}, now, {"its f16": before, "kvlab's full": full})
    file = ROOT / "docs" / "results" / "llama" / f"{asked.name}.json"
    about = {"model": asked.model.name, "made": made(), "llama.cpp": llama.features()}
    about |= {"tokens": len(ids) * DECODED, "lines": lines}
    write_file(file, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
