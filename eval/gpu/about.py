"""About: the machine and versions of these numbers."""

from __future__ import annotations

import os
import platform

from kvlab.extras import version

from ..core.machine import commit

PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "kvlab")


def about(dry: bool) -> dict:
    """The device and the versions."""
    import torch

    found: dict = {
        "device": "cpu (dry run)", "python": platform.python_version(), "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {name: version(name) for name in PACKAGES},
        "commit": os.environ.get("KVLAB_COMMIT") or commit(),
    }  # fmt: skip
    if not dry:
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        found |= {"device": torch.cuda.get_device_name(), "capability": capability}
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found
