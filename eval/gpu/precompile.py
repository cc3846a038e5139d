"""Precompile: our Triton kernels as machine code of a GPU that is not here, into Triton's cache.

Triton compiles for a target, and only launching needs a device. So the stages' own calls are made with CPU
tensors while a stand-in for the driver names the target and launches nothing. What is found there later, by
the same version of Triton, is not compiled again. It runs in processes of its own, since the stand-in stays.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from .. import PACKAGE
from ..core.ready import ours_first

CAPABILITY = 90  # of an H100
WARP = 32


def pretend(capability: int) -> None:
    """From now on every call of a kernel compiles it for this GPU and launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        """As much of a driver as compiling asks for."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, WARP)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device) -> int:
            return 0

    def run(self, *args, warmup, **given):
        launched(self, *args, warmup=True, **given)

    driver.set_active(Driver())
    launched, JITFunction.run = JITFunction.run, run


def compile_part(folder: Path, capability: int, part: int, parts: int) -> None:
    """Compile one of several parts of the kernels of the stages right and attention into `folder`."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    import torch

    pretend(capability)
    with torch.no_grad():
        for call in calls(divmod(capability, 10))[part::parts]:
            with contextlib.suppress(Exception):  # the others are of use all the same
                call()


def calls(capability: tuple[int, int] = divmod(CAPABILITY, 10)) -> list:
    """Every call of a kernel that the stages make on a GPU of this capability, as far as it tells kernels
    apart; what is tuned for first."""
    import torch

    from kvlab.fast import gpu, gpu_kivi, zero_copy

    from . import flash, right
    from .bench import Bench

    def attend(form, heads: int, kv_heads: int, dim: int, split: int) -> None:
        parts = form.encode(torch.randn(1, kv_heads, 64, dim).to(torch.bfloat16))
        query = torch.randn(1, heads, 1, dim).to(torch.bfloat16)
        gpu.attend(query, parts, parts, form, 0.1, None, split)

    def gather(width: int) -> None:
        part = torch.zeros(1, 2, 64, width, dtype=torch.uint8)
        zero_copy.gather((part,), torch.zeros(1, 2, 9, dtype=torch.long), torch.device("cpu"))

    found = [
        partial(attend, make(), *sizes, split)
        for name, sizes in flash.SHAPES.items()
        for make in map(right.FORMS.get, flash.NAMES)
        if name != "small" and gpu.compiles(capability)
        for split in (64, 16)  # more splits are merged by a kernel that is compiled there
    ]
    found += [partial(gather, width) for width in (64, 128, 256)]
    bench = Bench(dry=True)
    for name, make in (right.FORMS | right.KIVIS).items():
        kernel, tokens = (gpu_kivi, 77) if name in right.KIVIS else (gpu, 64)
        for dtype in right.DTYPES if name in right.PRESETS else ("bf16", "fp32"):
            for case in right.cases(name, dtype):
                small = case | {"dtype": dtype, "tokens": tokens, "batch": 1, "static": False}
                if gpu.compiles(capability):
                    found.append(partial(right.compared, bench, kernel, make(), small, 0))
    return found


def together(folder: Path, capability: int, parts: int, seconds: float) -> bool:
    """Let so many processes share the work out, at most for so many seconds; whether all came to an end."""
    words = [sys.executable, "-m", f"{PACKAGE}.gpu.precompile", str(folder), str(capability)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    with ours_first():
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        processes = [
            subprocess.Popen([*words, str(part), str(parts)], env=environment, **silent)
            for part in range(parts)
        ]
    until, late = time.monotonic() + seconds, 0
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            late += 1
    return not late


if __name__ == "__main__":
    compile_part(Path(sys.argv[1]), *map(int, sys.argv[2:]))
