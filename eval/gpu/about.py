"""About: what machine and which versions these numbers come from, and what is missing there."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import metadata

from ..core.machine import commit

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numba",
    "numpy",
    "hqq",
    "optimum-quanto",
    "kvlab",
)
# Bytes per second of a lane and direction, by generation: transfers per second over the bits of a code.
LANE = {
    1: 0.25e9,
    2: 0.5e9,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 7.56e9,
}
WITHOUT = {  # what a missing package costs
    "triton": "no Triton kernels: packed caches decode first, rows are not gathered by the device",
    "transformers": "no models: the stages right (methods), step, headline, throughput and accuracy fail",
    "hqq": "no row of transformers' QuantizedCache with hqq",
    "optimum-quanto": "no row of transformers' QuantizedCache with quanto",
}


def version(package: str) -> str | None:
    """Of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def about(dry: bool) -> dict:
    """The device, the versions, and `missing`: a line for everything that is not there."""
    import torch

    found: dict = {
        "device": "cpu (dry run)",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "commit": os.environ.get("KVLAB_COMMIT") or commit(),
        "missing": [line for name, line in WITHOUT.items() if version(name) is None],
    }
    if shutil.which("compute-sanitizer") is None:
        found["missing"].append("compute-sanitizer is not on the PATH: memory accesses are not checked")
    if dry:
        return found
    card = torch.cuda.get_device_properties(0)
    found |= {
        "device": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_bytes": card.total_memory,
        "processors": card.multi_processor_count,
        "cache_bytes": getattr(card, "L2_cache_size", None),
        "driver": asked("driver_version"),
        "pcie": pcie(),
    }
    if (card.major, card.minor) < (8, 9):
        found["missing"].append(f"capability {found['capability']} has no fp8: its rows are left out")
    if importlib.util.find_spec("transformers") and not known():
        found["missing"].append(
            f"transformers {version('transformers')} lacks interfaces that kvlab stands on: use the pack's"
        )
    return found


def known() -> bool:
    """Whether the transformers that is found has what kvlab's caches stand on."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401
        from transformers.cache_utils import DummyLayer  # noqa: F401
    except Exception:
        return False
    return True


def asked(what: str) -> str | None:
    """What nvidia-smi says of the first card; None where it says nothing."""
    try:
        command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip().split("\n")[0] or None


def pcie() -> dict | None:
    """Generation, lanes, and bytes per second in either direction of the widest link that card and slot agree
    on; None where nobody knows."""
    said = (asked("pcie.link.gen.max,pcie.link.width.max") or "").split(",")
    if len(said) != 2 or not all(word.strip().isdigit() for word in said) or int(said[0]) not in LANE:
        return None
    generation, width = map(int, said)
    return {"generation": generation, "lanes": width, "bandwidth": LANE[generation] * width}
