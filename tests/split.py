"""Decode every method on a model whose heads are split among processes: test_ranks.py lets torchrun do it.

Prints a JSON line for each method: rank, method, the largest difference of a step's logits from one
process's, KV heads held here, bytes held by one process, here, and by all processes together.
"""

import json
import sys

import torch
from every import make
from tiny import prompt, tiny
from transformers import AutoModelForCausalLM

import kvlab
from kvlab.models import prepare
from kvlab.ranks import rank_of, split, summed


def decoded(model, spec: str):
    """Logits of a prompt of two rows and of five steps, a fork among them, and the cache."""
    cache = make(model, spec)
    stepper = kvlab.Stepper(model, cache)
    found = [stepper.feed(prompt(18, rows=2), last=True)]
    for step in range(5):
        if step == 2:
            stepper.fork(torch.tensor([1, 0, 1]))
        found.append(stepper.feed(prompt(1, rows=3 if step > 1 else 2, seed=step)))
    return found, cache


def main(folder: str, specs: list[str]) -> None:
    shared = prepare(AutoModelForCausalLM.from_pretrained(folder, **split(folder)).eval())
    for spec in specs:
        expected, one = decoded(tiny("llama"), spec)
        try:
            found, cache = decoded(shared, spec)
        except ValueError as error:
            line = {"rank": rank_of(shared), "method": spec, "refused": str(error)}
            sys.stdout.write(json.dumps(line) + "\n")
            continue
        apart = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        held = [
            x.device_bytes + x.host_bytes for x in (one.stats(), cache.stats(), summed(shared, cache.stats()))
        ]
        heads = cache.layers[0].kv_heads
        line = {"rank": rank_of(shared), "method": spec, "apart": apart, "heads": heads, "held": held}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
