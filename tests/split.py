"""Decode every method on a model whose heads are split among processes: test_ranks.py lets torchrun do it.

Prints a JSON line for each method: rank, method, the largest difference of a step's logits from one
process's, KV heads held here, bytes held by one process, here, and by all processes together.
"""

import json
import sys

import torch
from every import decoded
from tiny import tiny
from transformers import AutoModelForCausalLM

from kvlab.models import prepare
from kvlab.ranks import rank_of, split, summed


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
