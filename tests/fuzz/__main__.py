"""The state machine on new seeds: `python -m fuzz SECONDS`."""

import contextlib
import random
import sys
import time

import torch
from fuzz.cases import METHODS, cases
from fuzz.machine import run, table


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    until = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < until:
            for method in METHODS:
                if time.monotonic() < until:
                    run(random.choice(cases(method)), 10, 30, random.randrange(2**32))
    print(table())


main(float(sys.argv[1]) if len(sys.argv) > 1 else 600)
