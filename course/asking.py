"""What real models write under each method, in words: `python -m course words smollm2|FILE.gguf`, minutes.

SmolLM2 is asked about clause 17 of the lease, a model that writes code for a function. The words are written
to course/teaching/words.json, with the digest of the model's files; the chapters show them.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch

import kvlab

from .harness import harness
from .teaching import lease
from .teaching.words import CITY, STORED

BUDGETS = 0.2, 0.05
FORMATS = ("int8", "fp8", "int4", "int4:rotate=true", "int4:axis=channel", "int2", "kivi4", "kivi2", "mixed",
           "turboquant", "kvquant")  # fmt: skip
KEEPS = ("random", "sinks", "h2o", "tova", "snapkv", "keydiff", "kvzip", "topk", "infinigen", "quest")
FIRST = "h2o:budget=0.03"  # what the course begins with: few enough tokens that the city goes
CODE = "Write a Python function that returns the n-th Fibonacci number."


def clause(model, tokenizer) -> list[list[str]]:
    """[method, words with the question known at compression, and unknown] about clause 17 of the lease."""
    context, question, _ = lease.asked_of_smollm2()[lease.CITIES.index(CITY)]
    methods = (
        "full",
        "offload",
        *FORMATS,
        *(f"{method}:budget={share}" for share in BUDGETS for method in KEEPS),
        FIRST,
    )
    whole = tokenizer(context + question, return_tensors="pt").input_ids  # [1, tokens]
    before, wrote = tokenizer(context, return_tensors="pt").input_ids.shape[1], {}
    for cut in (whole.shape[1] - 1, before):
        caches = {method: kvlab.make_cache(model, method) for method in methods}
        shared = harness("accuracy.prefill").shared
        for method, stepper, read in shared(model, caches, whole[:, :cut], None, last=True):
            if isinstance(read, Exception):
                raise read
            for token in whole[0, cut:]:
                logits = stepper.feed(token.view(1, 1), last=True)
            wrote.setdefault(method, []).append(_written(stepper, logits, tokenizer, 8))
    return [[method, *words] for method, words in wrote.items()]


def code(model, tokenizer) -> list[list[str]]:
    """[method, words] of an answer to CODE, the question known at compression."""
    asked = [{"role": "user", "content": CODE}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    rows = []
    for method in ("full", *FORMATS, *(f"{method}:budget=0.5" for method in KEEPS)):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, method))
        stepper.feed(ids[:, :-1])
        rows.append([method, _written(stepper, stepper.feed(ids[:, -1:], last=True), tokenizer, 96)])
    return rows


def _written(stepper, logits, tokenizer, new: int) -> str:
    """The most likely words, token by token, until the text ends."""
    words = []
    for _ in range(new):
        token = int(logits.argmax(-1))
        if token == tokenizer.eos_token_id:
            break
        words.append(token)
        logits = stepper.feed(torch.tensor([[token]]), last=True)
    return tokenizer.decode(words)


@torch.inference_mode()
def measure(name: str) -> None:
    """Ask one model, and store what it writes in place of what is stored of that model."""
    torch.set_num_threads(1)
    model, tokenizer = kvlab.load(name)
    study, columns = (
        (clause, ["question known", "question unknown"]) if name == "smollm2" else (code, ["words"])
    )
    rows = study(model, tokenizer)
    kept = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    kept[study.__name__] = {
        "model": "SmolLM2-135M-Instruct" if name == "smollm2" else Path(name).stem,
        "digest": harness("core.digests").model_digest(name),
        "asked": (lease.ASKED if study is clause else CODE).strip(),
        "columns": columns,
        "rows": rows,
        "made": datetime.date.today().isoformat(),
    }
    STORED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in rows:
        print(*row, sep="\n  ", flush=True)
