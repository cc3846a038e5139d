"""Decode every method on a model whose heads are split among processes: test_ranks.py lets torchrun do it.

Prints a JSON line for each method: rank, method, the largest difference of a step's logits from one
process's, KV heads held here, bytes held by one process, here, and by all processes together.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from every import decoded
from tiny import tiny
from transformers import AutoModelForCausalLM

from kvlab.models import prepare
from kvlab.ranks import rank_of, split, summed


def torchrun(*words: str) -> subprocess.CompletedProcess:
    """Two processes that share a model's heads."""
    tests = Path(__file__).resolve().parent
    places = os.pathsep.join([str(tests.parent), str(tests)])
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return subprocess.run(
        [*start, *words], cwd=tests.parent, env=environment, text=True, capture_output=True, timeout=600
    )


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
