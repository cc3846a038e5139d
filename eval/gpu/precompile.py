"""Precompile: our Triton kernels as machine code of a GPU that is not here, into Triton's cache.

Triton compiles for a target, and only launching needs a device. So the stages' own calls are made with CPU
tensors while a stand-in for the driver names the target and launches nothing. What is found there later, by
the same version of Triton, is not compiled again. `python -m eval.gpu.precompile FOLDER [CAPABILITY]`, a
process of its own, since the stand-in stays.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from ..core.workers import ours_first

CAPABILITY = 90  # of an H100
WARP = 32


def compiled(folder: Path, capability: int = CAPABILITY, part: int = 0, parts: int = 1) -> list[dict]:
    """Compile every kernel of the stages right and attention, or one of several parts of them, into `folder`:
    {kernel, given, registers, spilled (bytes), shared (bytes)} of each."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    import torch
    import triton
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

    driver.set_active(Driver())
    launched, found = JITFunction.run, {}

    def run(self, *args, grid, warmup, **given):
        kernel = launched(self, *args, grid=grid, warmup=True, **given)
        if kernel is not None and kernel.hash not in found:
            sizes = {name: value for name, value in given.items() if isinstance(value, int | bool)}
            found[kernel.hash] = {"kernel": self.fn.__name__, "given": sizes} | resources(triton, kernel)
        return kernel

    JITFunction.run = run
    try:
        with torch.no_grad():
            for call in calls(divmod(capability, 10))[part::parts]:
                try:
                    call()
                except Exception as error:  # the others are of use all the same
                    print(f"not compiled: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    finally:
        JITFunction.run = launched
    return list(found.values())


def calls(capability: tuple[int, int] = divmod(CAPABILITY, 10)) -> list:
    """Every call of a kernel that the stages make on a GPU of this capability, as far as it tells kernels
    apart; what is tuned for first."""
    import torch

    from kvlab.kernels import gpu, gpu_kivi
    from kvlab.link import zero_copy

    from . import attention, right

    def attend(form, heads: int, kv_heads: int, dim: int, dtype, mask: bool = False, split=None) -> None:
        parts = form.encode(torch.randn(1, kv_heads, 64, dim).to(dtype))
        query = torch.randn(1, heads, 1, dim).to(dtype)
        allowed = torch.ones(1, kv_heads, 1, 64, dtype=torch.bool) if mask else None
        gpu.attend(query, parts, parts, form, 0.1, allowed, split)

    def attend_kivi(policy, heads: int, kv_heads: int, dim: int, dtype, mask: bool = False) -> None:
        store = right.kivi_state(policy, dim)
        store.append(*torch.randn(2, 1, kv_heads, 77, dim).to(dtype))
        query = torch.randn(1, heads, 1, dim).to(dtype)
        allowed = torch.ones(1, kv_heads, 1, 77, dtype=torch.bool) if mask else None
        gpu_kivi.attend(query, store, 0.1, allowed, split=1)

    def gather(width: int) -> None:
        part = torch.zeros(1, 2, 64, width, dtype=torch.uint8)
        zero_copy.gather((part,), torch.zeros(1, 2, 9, dtype=torch.long), torch.device("cpu"))

    found = [
        partial(attend, make(), heads, kv_heads, dim, torch.bfloat16, split=split)
        for name, (heads, kv_heads, dim) in attention.SHAPES.items()
        if name != "small"
        for make in attention.FORMS.values()
        if gpu.compiles(make(), capability)
        for split in (64, 16)  # more splits are merged by a kernel that is compiled there
    ]
    found += [partial(gather, width) for width in (64, 128, 256)]
    for name, make in (right.FORMS | right.KIVIS).items():
        if not gpu.compiles(make(), capability):
            continue
        for dtype, kind in right.DTYPES.items():
            if dtype == "fp16" and name not in right.PRESETS:
                continue
            for case in right.cases(name, dtype):
                heads, dim = 3 * case["share"], case["head_dim"]
                if name in right.KIVIS:
                    found.append(partial(attend_kivi, make(), heads, 3, dim, kind, case["mask"]))
                elif gpu.supports(make(), dim):
                    found.append(partial(attend, make(), heads, 3, dim, kind, case["mask"]))
    return found


def resources(triton, kernel) -> dict:
    """Registers, bytes spilled and shared memory of a compiled kernel, as cuobjdump says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    about = {"shared": kernel.metadata.shared}
    if not tool.is_file():
        return about
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    for name, word in (("registers", "REG"), ("spilled", "STACK")):
        if match := re.search(rf"{word}:(\d+)", said):
            about[name] = int(match[1])
    return about


def started(folder: Path, capability: int, parts: int) -> list[subprocess.Popen]:
    """Processes that share the work out."""
    words = [sys.executable, "-m", "eval.gpu.precompile", str(folder), str(capability)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ours_first():
        environment |= {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    return [
        subprocess.Popen([*words, str(part), str(parts)], env=environment, **silent) for part in range(parts)
    ]


def main(folder: str, capability: str = str(CAPABILITY), part: str = "0", parts: str = "1") -> None:
    found = compiled(Path(folder), int(capability), int(part), int(parts))
    spilling = [row for row in found if row.get("spilled")]
    print(f"{len(found)} kernels compiled for sm_{capability}, {len(spilling)} of them spill registers")
    for row in spilling:
        print(f"  {row['kernel']} {row['given']}: {row['spilled']} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
