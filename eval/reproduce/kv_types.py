"""Types: the cost of llama.cpp's own types of K and V, beside ours: one GGUF file, the gate's tokens.

`python -m eval.reproduce.kv_types --model FILE.gguf --name NAME` writes docs/results/llama/NAME.json. It
needs llama.cpp as docs/performance.md builds it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

import kvlab
from kvlab.gating.formats import apart, decoded
from kvlab.gating.gate import DECODED, PIECES, PROMPT, made
from kvlab.gating.reading import Reading
from kvlab.gating.texts import rows
from kvlab.models import ModelShape

from ..core.digests import ROOT
from ..core.files import write_file
from . import llama

TYPES = (("f16", True), ("q8_0", True), ("q5_0", True), ("q4_0", True), ("q4_0", False))
UNTURNED = "LLAMA_ATTN_ROT_DISABLE"  # without llama.cpp's rotation, which it applies to quantized types


def said(model: llama.Model, shape: ModelShape, ids: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Log-probabilities `[rows, vocabulary]` after each of the `DECODED` last tokens of `[rows, tokens]`."""
    found = []
    for row in ids:
        run = llama.Context(model, shape, kind, True, len(row), torch.get_num_threads())
        run.feed(row[None, :PROMPT])
        found.append([run.feed(row[None, at : at + 1]).log_softmax(-1) for at in range(PROMPT, len(row))])
        run.close()
    return [torch.stack(after) for after in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--name", required=True, help="of the file that is written")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model, tokenizer = kvlab.load(str(asked.model), engine="eager")
    ids = rows(tokenizer, PROMPT + DECODED, PIECES)
    ours = decoded(Reading.of(model, ids[:, :PROMPT]), ids[:, PROMPT:])
    shape, theirs, lines, f16 = ModelShape.of(model), llama.Model(asked.model), [], []
    for kind, turned in TYPES:
        os.environ[UNTURNED] = "0" if turned else "1"
        now = said(theirs, shape, ids, kind)
        f16 = now if kind == "f16" else f16
        for against, right in (("its f16", f16), ("kvlab's full", ours)):
            lines.append({"type": kind, "turned": turned, "against": against, **apart(now, right)})
        print(kind, turned, lines[-2]["nats"], lines[-1]["nats"], flush=True)
    file = ROOT / "docs" / "results" / "llama" / f"{asked.name}.json"
    about = {"model": asked.model.name, "made": made(), "llama.cpp": llama.features()}
    about |= {"tokens": len(ids) * DECODED, "lines": lines}
    write_file(file, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
