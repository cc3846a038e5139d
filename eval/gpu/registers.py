"""Registers: our Triton kernels' use of a GPU that is not here: `python -m eval.gpu.registers [90 80]`.

Registers of a thread, bytes of shared memory and, where registers did not do, bytes of a thread's stack, by
the compiler of the Triton that is installed. Nothing is launched.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .precompile import pretend

DIMENSIONS = (64, 128, 80, 96, 160, 256)


def taken(kernel) -> str:
    """Registers of a compiled kernel, and its bytes on the stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr).groups()
    return registers + (f" + {stack} B spilled" if stack != "0" else "")


def table(capability: int) -> list[str]:
    """A row of every format, bf16 and fp16 queries of four heads a KV head: a Markdown table."""
    import torch

    from kvlab.fast import gpu, gpu_kivi

    from .right import FORMS, KIVIS, holding

    made: list = []
    pretend(capability, lambda kernel: made.append(kernel))
    lines = [
        f"| sm_{capability} | " + " | ".join(map(str, DIMENSIONS)) + " |",
        "|---|" + "--:|" * len(DIMENSIONS),
    ]
    forms = {**FORMS, **KIVIS}
    for dtype in (torch.bfloat16, torch.float16):
        for name, form in forms.items():
            cells = []
            for dim in DIMENSIONS:
                query, x = torch.zeros(1, 8, 1, dim, dtype=dtype), torch.randn(1, 2, 80, dim).to(dtype)
                made.clear()
                if name in KIVIS:
                    gpu_kivi.attend(query, holding(form(), x, x), 0.1)
                elif gpu.supports(form(), dim):
                    gpu.attend(query, form().encode(x), form().encode(x), form(), 0.1)
                cells.append(taken(made[0]) if made else "–")
            lines.append(f"| {name}, {str(dtype)[6:]} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    capabilities = [int(word) for word in sys.argv[1:]] or [90, 80]
    if len(capabilities) == 1:
        print("\n".join(table(*capabilities)))
    else:  # the stand-in for a driver stays
        for one in capabilities:
            subprocess.run([sys.executable, "-m", "eval.gpu.registers", str(one)], check=True)
